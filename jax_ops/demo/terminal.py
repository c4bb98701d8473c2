"""What the demo shows while it runs: a progress line on stderr, and on stdout the answers as they grow."""

import sys
from typing import TextIO

ERASE_LINE = "\r\x1b[2K"


class Progress:
    """The progress line: rewritten in place on a terminal; elsewhere each phase is a line, and ticks are not shown."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._rewrites = self._stream.isatty()

    def phase(self, text: str) -> None:
        """Shows that something began."""
        self._write(ERASE_LINE + text if self._rewrites else text + "\n")

    def tick(self, text: str) -> None:
        """Shows how far it is."""
        if self._rewrites:
            self._write(ERASE_LINE + text)

    def clear(self) -> None:
        """Makes room for other output on the terminal."""
        if self._rewrites:
            self._write(ERASE_LINE)

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


class Transcript:
    """Prints answers as they grow: a single one as it comes, several line by line, each line under its number."""

    def __init__(self, count: int, progress: Progress, stream: TextIO | None = None, width: int = 100) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._progress = progress
        self._width = width
        self._pending = [""] * count

    def prompt(self, row: int, text: str) -> None:
        """Prints a prompt."""
        self.add(row, "".join(f"> {line}\n" for line in text.splitlines()))

    def add(self, row: int, text: str) -> None:
        """Continues an answer."""
        if len(self._pending) == 1:
            self._write(text)
            return
        lines, self._pending[row] = full_lines(self._pending[row] + text, self._width)
        self._write("".join(f"[{row + 1}] {line}\n" for line in lines))

    def _write(self, text: str) -> None:
        if text:
            self._progress.clear()
            self._stream.write(text)
            self._stream.flush()


def full_lines(text: str, width: int) -> tuple[list[str], str]:
    """Cuts the complete lines, of at most `width`, off a growing text: at its newlines, or at spaces, or where it must.

    Example:
      >>> full_lines("one two three", width=8)
      (['one two'], 'three')
    """
    lines = []
    while True:
        line, newline, rest = text.partition("\n")
        if len(line) > width:
            cut = line.rfind(" ", 1, width + 1)
            end = cut if cut > 0 else width
            line, rest = text[:end], text[end:].removeprefix(" ")
        elif not newline:
            return lines, text
        lines.append(line)
        text = rest
