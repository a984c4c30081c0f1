"""`pellucid run` on a terminal, which a pseudo-terminal imitates: how thoughts are shown."""

import json
import os
import pty
import subprocess

from serving import TIMEOUT_S

# The reply begins within thoughts, which the budget ends.
TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}<think>\n"
DIM, NORMAL = "\x1b[2m", "\x1b[0m"


def command(binaries, folder, *flags):
    template = folder / "thinking.jinja"
    template.write_text(TEMPLATE + "{# </think> #}")
    words = [binaries / "pellucid", "run", "--model", "tiny", "Once upon a time", "--chat-template", template]
    words += ["--thinking-budget", "12", "--seed", "7", "-n", "60", *flags]
    environment = {"PATH": os.environ["PATH"], "PELLUCID_HOME": str(folder), "TERM": "xterm"}
    return [str(word) for word in words], environment


def on_terminal(binaries, folder, *flags, **variables):
    """Returns what a run writes to its terminal, and what it writes to standard error."""
    words, environment = command(binaries, folder, *flags)
    terminal, stdout = pty.openpty()
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE,
                               env={**environment, **variables}, cwd=folder)
    os.close(stdout)
    shown = b""
    while True:
        try:
            piece = os.read(terminal, 4096)
        except OSError:
            # The last program that had the terminal open has ended.
            break
        if not piece:
            break
        shown += piece
    os.close(terminal)
    errors = process.communicate(timeout=TIMEOUT_S)[1].decode()
    assert process.returncode == 0, errors
    return shown.decode(), errors


def squeezed(text):
    """Leaves out white space, since lines are wrapped on a terminal."""
    return "".join(text.split())


def test_thoughts_are_dimmed_or_folded(binaries, tmp_path):
    words, environment = command(binaries, tmp_path, "--json")
    report = json.loads(subprocess.run(words, env=environment, capture_output=True, check=True).stdout)
    thoughts, answer = squeezed(report["thoughts"]), squeezed(report["text"])
    assert thoughts and answer, report
    shown, errors = on_terminal(binaries, tmp_path)
    assert squeezed(shown) == DIM + thoughts + NORMAL + answer
    assert "are not shown" not in errors
    shown, _ = on_terminal(binaries, tmp_path, NO_COLOR="1")
    assert squeezed(shown) == "(thoughts)" + thoughts + "(answer)" + answer
    shown, errors = on_terminal(binaries, tmp_path, "--hide-thinking")
    assert squeezed(shown) == answer
    assert f"[{report['tokens']['thoughts']} tokens of thoughts are not shown]" in errors
