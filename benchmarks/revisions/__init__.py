"""What ``compare_revisions.py`` runs: the same cases on two revisions, and their comparison."""
