#!/usr/bin/env python3
"""Renders colored terminal output from standard input as an SVG on standard output.

pellucid explain --color always --raw --seed 2 -n 1 "The sky at night is" |
    sed -n '/━ token/,/━ the end/p' | sed '$d' |
    docs/images/terminal_svg.py \
        'pellucid explain --raw --seed 2 "The sky at night is"' > docs/images/explain.svg

Each character has an explicit x, so the columns line up whatever the width of the viewer's font is.
"""

import html
import re
import sys

CELL_WIDTH, LINE_HEIGHT, MARGIN, FONT_SIZE = 8.4, 19, 18, 14
BACKGROUND, FOREGROUND, DIM = "#0d1117", "#d6dde6", "#7d8794"
COLORS = {30: "#484f58", 31: "#ff7b72", 32: "#56d364", 33: "#e3b341"}
COLORS |= {34: "#79c0ff", 35: "#d2a8ff", 36: "#56d4dd", 37: FOREGROUND}
FONTS = "ui-monospace, SFMono-Regular, Menlo, Consolas, DejaVu Sans Mono, monospace"
# Bars of eighths of a cell are drawn as rectangles, because fonts leave gaps between them.
EIGHTHS = " ▏▎▍▌▋▊▉█"


def runs(line, style):
    """Splits a line at its escape sequences; yields text with the style in effect."""
    for index, part in enumerate(re.split(r"\x1b\[([0-9;]*)m", line)):
        if index % 2 == 0:
            yield part, dict(style)
            continue
        for code in (int(code or 0) for code in part.split(";")):
            if code == 0:
                style.clear()
            elif code == 1:
                style["bold"] = True
            elif code == 2:
                style["dim"] = True
            elif code % 60 in COLORS:
                style["color"] = COLORS[code % 60]


def rectangle(x, y, width, height, color):
    return f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" fill="{color}"/>'


def render(lines, title):
    width = max(len(re.sub(r"\x1b\[[0-9;]*m", "", line)) for line in lines + [f"$ {title}"])
    height = (len(lines) + 2) * LINE_HEIGHT + 2 * MARGIN
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width * CELL_WIDTH + 2 * MARGIN:.0f}" height="{height}" '
        f'font-family="{FONTS}" font-size="{FONT_SIZE}">',
        f"<title>{html.escape(title)}</title>",
        f'<rect width="100%" height="100%" rx="8" fill="{BACKGROUND}"/>',
    ]
    style = {}
    for row, line in enumerate([f"\x1b[32m$\x1b[0m \x1b[1m{title}\x1b[0m", ""] + lines):
        column, top = 0, MARGIN + row * LINE_HEIGHT
        for text, current in runs(line, style):
            color = DIM if current.get("dim") else current.get("color", FOREGROUND)
            weight = ' font-weight="bold"' if current.get("bold") else ""
            for piece in re.findall(r"[▏▎▍▌▋▊▉█]+|━+|[^▏▎▍▌▋▊▉█━]+", text):
                x = MARGIN + column * CELL_WIDTH
                if piece[0] in EIGHTHS[1:]:
                    filled = sum(EIGHTHS.index(block) for block in piece) / 8
                    out.append(rectangle(x, top + 3, filled * CELL_WIDTH, 13, color))
                elif piece[0] == "━":
                    out.append(rectangle(x, top + 9, len(piece) * CELL_WIDTH, 2, color))
                elif piece.strip():
                    places = " ".join(f"{x + index * CELL_WIDTH:.1f}" for index in range(len(piece)))
                    attributes = f'x="{places}" y="{top + 14}" fill="{color}"{weight}'
                    out.append(f'<text xml:space="preserve" {attributes}>{html.escape(piece)}</text>')
                column += len(piece)
    out.append("</svg>")
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    text = [line.rstrip("\n") for line in sys.stdin]
    while text and not text[0].strip():
        text.pop(0)
    while text and not text[-1].strip():
        text.pop()
    sys.stdout.write(render(text, sys.argv[1]))
