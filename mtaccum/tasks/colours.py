"""Colours for drawn predictions and labels: one for each class, a scale for numbers, grey for no label."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

NO_LABEL = 0.5
"""Red, green and blue of pixels without a label: a grey that is no class's colour and not on the scale."""

# M. Okabe and K. Ito, "Color Universal Design" (2008): eight colours that the colour-blind tell apart
_OKABE_ITO = ("000000", "e69f00", "56b4e9", "009e73", "f0e442", "0072b2", "d55e00", "cc79a7")
# every 32nd colour of viridis, by S. van der Walt and N. Smith for matplotlib (CC0)
_VIRIDIS = ("440154", "472d7b", "3b528b", "2c728e", "21918c", "28ae80", "5ec962", "addc30", "fde725")
_MOST_CLASSES = 512  # with a colour of their own
_LEAST_LIGHTNESS = 0.45  # of the others; class 0, often the background, is black


def paint_classes(classes: Tensor, valid: Tensor | None = None) -> Tensor:
    """A picture of classes. Class k has the same colour whatever the number of classes.

    Args:
        classes: integers (batch, height, width), at least 0 where they are valid.
        valid: booleans of that shape; the other pixels are grey.

    Returns:
        RGB (batch, 3, height, width) in [0, 1].
    """
    if valid is not None:
        classes = torch.where(valid, classes, 0)
    count = 1 + int(classes.max()) if classes.numel() else 1
    colours = class_colours(min(count, _MOST_CLASSES)).to(classes.device)
    return _greyed(colours[classes % _MOST_CLASSES], valid)


def paint_values(values: Tensor, low: Tensor, high: Tensor, valid: Tensor | None = None) -> Tensor:
    """A picture of numbers, from dark blue at ``low`` over green to yellow at ``high``.

    Args:
        values: (batch, height, width); what is NaN is grey.
        low, high: the limits (batch, 1, 1); what is beyond has their colours.
        valid: booleans of the values' shape; the other pixels are grey.

    Returns:
        RGB (batch, 3, height, width) in [0, 1].
    """
    known = ~values.isnan() if valid is None else valid & ~values.isnan()
    span = (high - low).clamp_min(torch.finfo(values.dtype).tiny)
    fraction = torch.where(known, (values - low) / span, 0).nan_to_num(0).clamp(0, 1)
    anchors = _parsed(_VIRIDIS).T.unsqueeze(0)
    scale = F.interpolate(anchors, size=256, mode="linear", align_corners=True)[0].T
    return _greyed(scale.to(values.device)[(fraction * 255).round().long()], known)


def finite_limits(pixels: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Smallest and largest finite valid value of each sample (batch, 1, ...); inf and -inf if it has none."""
    known = pixels.isfinite() if valid is None else pixels.isfinite() & valid
    inside = tuple(range(1, pixels.dim()))
    low = torch.where(known, pixels, torch.inf).amin(dim=inside, keepdim=True)
    high = torch.where(known, pixels, -torch.inf).amax(dim=inside, keepdim=True)
    return low, high


@lru_cache(maxsize=8)
def class_colours(count: int) -> Tensor:
    """Colours for classes, RGB (count, 3) in [0, 1]; fewer of them are the first ones of more.

    After those of Okabe and Ito, each is the one farthest from all before it and from the grey, as by Glasbey
    et al., "Colour displays for categorical images" (2007), with distances in Oklab (B. Ottosson, 2020).
    """
    fixed = _parsed(_OKABE_ITO)
    if count <= len(fixed):
        return fixed[:count]
    steps = torch.linspace(0, 1, 12)
    candidates = torch.cartesian_prod(steps, steps, steps)
    candidates = candidates[_oklab(candidates)[:, 0] > _LEAST_LIGHTNESS]
    places = _oklab(candidates)
    taken = _oklab(torch.cat([fixed, torch.tensor([[NO_LABEL] * 3, [1.0] * 3])]))  # white is around pictures
    distance = torch.cdist(places, taken).amin(dim=1)
    chosen = []
    for _ in range(count - len(fixed)):
        chosen.append(int(distance.argmax()))
        distance = torch.minimum(distance, (places - places[chosen[-1]]).norm(dim=1))
    return torch.cat([fixed, candidates[chosen]])


def _greyed(pixels: Tensor, valid: Tensor | None) -> Tensor:
    """RGB (batch, 3, height, width) of (batch, height, width, 3), grey where not valid."""
    if valid is not None:
        pixels = torch.where(valid.unsqueeze(-1), pixels, NO_LABEL)
    return pixels.permute(0, 3, 1, 2)


def _parsed(colours: tuple[str, ...]) -> Tensor:
    return torch.tensor([list(bytes.fromhex(colour)) for colour in colours]) / 255


def _oklab(colours: Tensor) -> Tensor:
    """RGB (n, 3) in the coordinates of Oklab, in which distances are about as large as they look."""
    colours = colours.double()
    linear = torch.where(colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)
    cones = torch.tensor(
        [
            [0.4122214708, 0.5363325363, 0.0514459929],
            [0.2119034982, 0.6806995451, 0.1073969566],
            [0.0883024619, 0.2817188376, 0.6299787005],
        ],
        dtype=torch.float64,
    )
    opponents = torch.tensor(
        [
            [0.2104542553, 0.7936177850, -0.0040720468],
            [1.9779984951, -2.4285922050, 0.4505937099],
            [0.0259040371, 0.7827717662, -0.8086757660],
        ],
        dtype=torch.float64,
    )
    return (linear @ cones.T) ** (1 / 3) @ opponents.T
