"""Views of pages: at the widths of a phone and of a desk, light and dark, with the same letters on each machine."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib
from PIL import Image

from tests.support.site import SCHEMES, Browser, build_site
from tests.support.site_pictures.sample import build_sample

HARNESS = "views.html"  # shows all views at once: a browser takes seconds to start
SAMPLE = "sample/index.html"
PAGES = ("index.html", "settings.html", "quickstart-ascend.html", "troubleshooting.html")
SIZES = {"phone": (390, 844), "desk": (1440, 900)}  # pixels; of a page its first screen
SAMPLE_SIZES = {"phone": (390, 2400), "desk": (1440, 1900)}  # all of it
TALLEST = 8000  # pixels of a window
FONTS = {  # matplotlib brings them: lines of text are as long wherever it is installed
    "DejaVuSans.ttf": "family: letters",
    "DejaVuSans-Bold.ttf": "family: letters; font-weight: bold",
    "DejaVuSans-Oblique.ttf": "family: letters; font-style: italic",
    "DejaVuSansMono.ttf": "family: 'letters of code'",
}
LETTERS = "".join(f"@font-face {{ font-{what}; src: url(/fonts/{file}); }} " for file, what in FONTS.items())
LOOK = f"{LETTERS} :root {{ --md-text-font: letters; --md-code-font: 'letters of code'; }}"
REWORD = """
const article = shown.querySelector("article"), walker = shown.createTreeWalker(article, NodeFilter.SHOW_TEXT);
for (let node; (node = walker.nextNode());)
  if (!node.parentElement.closest("code, h1, h2, h3, svg, script"))
    node.textContent = node.textContent.split(" ").filter((_, place) => place % 5 != 3).reverse().join(" ");
"""
"""What leaves out each fifth word of a page, and turns the others around."""
SHOW = """<!doctype html><body style="margin:0"><script>
for (const view of VIEWS) {
  const frame = document.createElement("iframe");
  frame.style = `position:absolute; border:0; left:${view.corner[0]}px; top:${view.corner[1]}px`;
  [frame.width, frame.height] = view.size;
  frame.onload = () => {
    const shown = frame.contentDocument, style = shown.createElement("style");
    style.textContent = view.style;
    shown.head.append(style);
    if (view.left_out !== null)
      [...shown.styleSheets].find(sheet => (sheet.href || "").endsWith("/site.css")).deleteRule(view.left_out);
    if (view.is_reworded) { REWORD }
  };
  frame.src = view.page;
  document.body.append(frame);
}
</script></body>"""


@dataclass(frozen=True)
class View:
    """A page as a reader sees it.

    Attributes:
        page: address within the site.
        screen: name of its size.
        scheme: name of its colours.
        style: further rules, such as mistakes that are to be noticed.
        left_out: number of a rule of docs/site.css that does not hold.
        is_reworded: whether its text is another.
    """

    page: str
    screen: str
    scheme: str
    style: str = ""
    left_out: int | None = None
    is_reworded: bool = False

    @property
    def size(self) -> tuple[int, int]:
        """Its width and height in pixels."""
        return (SAMPLE_SIZES if self.page == SAMPLE else SIZES)[self.screen]

    @property
    def name(self) -> str:
        """Name of its picture."""
        page = "sample" if self.page == SAMPLE else Path(self.page).stem
        return f"{page}-{self.screen}-{self.scheme}"


VIEWS = tuple(View(page, screen, scheme) for page in (SAMPLE, *PAGES) for screen in SIZES for scheme in SCHEMES)


def build_pages(folder: Path) -> None:
    """Build the site into a folder, and the sample and the letters into folders within it."""
    build_site(folder)
    build_sample(folder / Path(SAMPLE).parent)
    (folder / "fonts").mkdir()
    for file in FONTS:
        shutil.copy(Path(matplotlib.get_data_path(), "fonts", "ttf", file), folder / "fonts")


def shoot(views: Sequence[View], site: Path, address: str, browser: Browser) -> list[Image.Image]:
    """Return the pictures of views of one scheme; the site lies in a folder, which is served at an address."""
    (scheme,) = {view.scheme for view in views}
    corners = place([view.size for view in views])
    frames = [
        {**asdict(view), "page": f"/{view.page}", "style": LOOK + view.style, "size": view.size, "corner": corner}
        for view, corner in zip(views, corners, strict=True)
    ]
    (site / HARNESS).write_text(SHOW.replace("VIEWS", json.dumps(frames)).replace("REWORD", REWORD))
    boxes = [
        (left, top, left + view.size[0], top + view.size[1]) for view, (left, top) in zip(views, corners, strict=True)
    ]
    file = site / "views.png"
    browser.shoot(address + HARNESS, scheme, (max(box[2] for box in boxes), max(box[3] for box in boxes)), file)
    whole = Image.open(io.BytesIO(file.read_bytes())).convert("RGB")
    return [whole.crop(box) for box in boxes]


def place(sizes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return left upper corners of frames of these sizes, one below another in columns that a browser can picture."""
    corners, left, top, widest = [], 0, 0, 0
    for width, height in sizes:
        if top + height > TALLEST:
            left, top, widest = left + widest, 0, 0
        corners.append((left, top))
        top, widest = top + height, max(widest, width)
    return corners
