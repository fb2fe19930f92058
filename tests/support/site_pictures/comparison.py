"""How far a picture of a page is from the stored one.

The sample's text stays the same: its picture is compared place by place. That of other pages changes often: of these
only the columns are compared, which a line more or less, or another one, hardly changes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tests.support.site_pictures.views import SAMPLE, View

STORED = Path(__file__).with_name("stored")
# Colours of stored pictures, which are half as wide: so all of them together take less than 300 KiB. They are those of
# the theme and of figures; the commonest ones of a picture would be shades between its letters and its ground.
COLOURS = (
    "ffffff f5f5f5 dcdcdc b4b4b4 848484 565656 212121 1e2129 2c2f38 3f51b5 303fa1 4a8fd0 5e8bde d98324 2e7d4f a626a4"
)
CELL = 10  # pixels of a stored picture: about a line of text, in which the form of letters does not count
FAR = 0.05  # of the whole range of lightness or colour: more than letters drawn in another way differ by
MOST_CELLS = 0.01  # that may be far from the stored ones
BANDS = 24  # columns of a page
MOST_INK = 0.15  # of what a page's columns have, that may be elsewhere


def shrink(picture: Image.Image) -> Image.Image:
    """Return a picture as it is stored."""
    half = picture.resize((picture.width // 2, picture.height // 2), Image.Resampling.BOX)
    palette = Image.new("P", (1, 1))
    palette.putpalette(list(bytes.fromhex(COLOURS)))
    return half.quantize(palette=palette, dither=Image.Dither.NONE)


def store(picture: Image.Image, name: str) -> None:
    """Store the picture of a view."""
    shrink(picture).save(STORED / f"{name}.png", optimize=True, bits=4)


def read(name: str) -> Image.Image:
    """Return the stored picture of a view."""
    return Image.open(STORED / f"{name}.png")


def find_fault(view: View, seen: Image.Image) -> str:
    """Return in what a picture differs too much from the stored one of the view; nothing if it does not."""
    stored = read(view.name)
    if seen.width // 2 != stored.width or seen.height // 2 != stored.height:
        return f"{view.name}: has another size"
    if view.page == SAMPLE:
        share, most, what = compare_places(seen, stored), MOST_CELLS, "of the page looks"
    else:
        share, most, what = compare_columns(seen, stored), MOST_INK, "of what its columns show is"
    return f"{view.name}: {share:.1%} {what} different" if share > most else ""


def compare_places(seen: Image.Image, stored: Image.Image) -> float:
    """Return the share of cells that are far from those of the stored picture."""
    one, other = (read_cells(picture) for picture in (shrink(seen), stored))
    return float((np.abs(one - other).max(axis=2) > FAR).mean())


def read_cells(picture: Image.Image) -> NDArray[np.float64]:
    """Return the mean colour of each cell, from 0 to 1 [rows, columns, 3]."""
    size = (picture.width // CELL, picture.height // CELL)
    return np.asarray(picture.convert("RGB").resize(size, Image.Resampling.BOX), np.float64) / 255


def compare_columns(seen: Image.Image, stored: Image.Image) -> float:
    """Return by how much of its ink a page differs in its columns, whatever its lines say."""
    one, other = (read_columns(picture) for picture in (shrink(seen), stored))
    return float(np.abs(one - other).sum() / other.sum())


def read_columns(picture: Image.Image) -> NDArray[np.float64]:
    """Return how far columns are from the ground in the mean; the ground is the commonest colour [bands, 3]."""
    pixels = np.asarray(picture.convert("RGB"), np.float64) / 255
    colours, counts = np.unique(pixels.reshape(-1, 3), axis=0, return_counts=True)
    ink = np.abs(pixels - colours[counts.argmax()]).mean(axis=0)
    return np.stack([band.mean(axis=0) for band in np.array_split(ink, BANDS)])
