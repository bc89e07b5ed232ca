"""What an exported picture of the screen shows, as rows of text: where each word stands, and none
of the ids, colours and fonts that change with every version of the library."""

from __future__ import annotations

import re
from xml.etree import ElementTree

_TEXT = "{http://www.w3.org/2000/svg}text"
# An exported cell is this many units wide, whatever the size of the screen.
CELL_WIDTH = 12.2
_NO_COLOUR = "#c5c8c6"


def rows(svg: str) -> list[str]:
    """The screen's rows, blank ends cut off."""
    grid: dict[int, dict[int, str]] = {}
    for element in ElementTree.fromstring(svg).iter(_TEXT):
        if "clip-path" not in element.attrib:
            continue  # the window's title
        line = int(re.findall(r"line-(\d+)", element.attrib["clip-path"])[0])
        column = round(float(element.attrib["x"]) / CELL_WIDTH)
        for letter in (element.text or "").replace("\xa0", " "):
            grid.setdefault(line, {})[column] = letter
            column += 1
    height = max(grid, default=-1) + 1
    return [_row(grid.get(line, {})) for line in range(height)]


def colours(svg: str) -> set[str]:
    """Every colour that the picture's text and cells have, as #rrggbb; less the exporter's own for
    text that has none."""
    styles = "".join(re.findall(r"<style>(.*?)</style>", svg, re.DOTALL))
    # The window that is drawn around the screen has buttons of its own.
    cells = re.findall(r'<rect fill="(#[0-9a-f]{6})" x="[^"]+" y="[^"]+"', svg)
    return (set(re.findall(r"fill: (#[0-9a-f]{6})", styles)) | set(cells)) - {_NO_COLOUR}


def _row(cells: dict[int, str]) -> str:
    return "".join(cells.get(column, " ") for column in range(max(cells, default=-1) + 1)).rstrip()
