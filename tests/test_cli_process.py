"""The command among other processes: signals, closed and broken streams, and a person at a terminal."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import suppress

import pytest

from dflash_ort.cli.process import one_interrupt
from tests.shell import Home, Terminal, at_home, call, finish, json_of, start

LONG = ("--ignore-eos", "--max-new-tokens", "8000")


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    with at_home(tmp_path_factory.mktemp("home")) as made:
        yield made


class TestProcess:
    def test_interrupting_an_answer(self) -> None:
        process = start("run", *LONG, "Hello")
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        done = finish(process)
        assert (done.code, done.err) == (130, "stopped\n")
        assert done.out.endswith("\n")

    def test_further_interrupts_while_it_clears_away(self) -> None:
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            cleared = False
            with suppress(KeyboardInterrupt), one_interrupt():
                try:
                    signal.raise_signal(signal.SIGINT)
                    pytest.fail("the first one does interrupt")
                finally:
                    signal.raise_signal(signal.SIGINT)
                    cleared = True
            assert cleared
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        finally:
            signal.signal(signal.SIGINT, before)

    def test_a_reader_that_leaves(self) -> None:
        process = start("run", *LONG, "Hello")
        assert process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 1
        process.stdin.close()
        process.stderr.close()

    @pytest.mark.parametrize("number", [0, 1, 2])
    def test_closed_streams(self, number: int) -> None:
        done = finish(start("run", "Hello", "--max-new-tokens", "3", "--stats", first=f"os.close({number})"))
        assert done.code == 0
        assert bool(done.out) == (number != 1)
        assert bool(done.err) == (number != 2)
        assert "Traceback" not in done.err

    def test_output_that_cannot_be_written(self) -> None:
        with open("/dev/full", "wb") as full:
            done = finish(start("run", "Hello", "--max-new-tokens", "3", stdout=full))
        assert done.error == "No space left on device"

    def test_a_terminal_that_knows_no_unicode(self) -> None:
        narrow = {"PYTHONIOENCODING": "latin-1"}  # ascii alone click takes for a mistake and widens
        options = ("--max-new-tokens", "40", "Hello")
        wide = json_of(call("run", "--json", *options))
        assert "\ufffd" in wide["text"], "this prompt does not test it"
        assert json_of(finish(start("run", "--json", *options, env=narrow)))["text"] == wide["text"]
        shown = start("run", *options, env=narrow)
        with shown:
            assert shown.communicate() == (wide["text"].encode("latin-1", "replace") + b"\n", b"")


class TestChat:
    TURN = r"time [^\n]* s\r\n(?:[a-z]+ [^\n]*\r\n)*> "

    def test_turns_new_and_the_end(self) -> None:
        def prompt_tokens(shown: str) -> int:
            return int(shown.split("tokens     ")[1].split()[0])

        with Terminal("run", "--stats", "--max-new-tokens", "5", "--system", "Be brief.") as terminal:
            assert "chatting with target; Ctrl-D ends" in terminal.wait_for("> ")
            terminal.type("Hello\n")
            first = prompt_tokens(terminal.wait_for(self.TURN))
            terminal.type("\n")
            terminal.wait_for("> ")
            terminal.type("Hello\n")
            assert prompt_tokens(terminal.wait_for(self.TURN)) > first + len("Hello")
            terminal.type("/new\n")
            terminal.wait_for("started over\r\n> ")
            terminal.type("Hello\n")
            assert prompt_tokens(terminal.wait_for(self.TURN)) == first
            for _ in range(2):
                terminal.type("x" * 3000 + "\n")
                terminal.wait_for(self.TURN)
            terminal.type("x" * 3000 + "\n")
            terminal.wait_for(r"error: the prompt has \d+ tokens[^\n]*/new starts over\)\r\n> ")
            terminal.type("Hello\n")
            terminal.wait_for(self.TURN)
            assert terminal.end("\x04") == 0

    def test_interrupting(self) -> None:
        with Terminal("run", "--stats", *LONG) as terminal:
            terminal.wait_for("> ")
            terminal.type("Hello\n")
            terminal.wait_for("Hello\r\n.{20}")
            terminal.type("\x03")
            shown = terminal.wait_for(self.TURN)
            assert "(cancelled)" in shown
            terminal.type("Again\n")
            terminal.wait_for("Again\r\n.{20}")
            terminal.type("\x03")
            terminal.wait_for(self.TURN)
            terminal.type("half a li")
            terminal.wait_for("half a li")
            assert terminal.end("\x03") == 130
            assert terminal.seen.endswith("stopped\r\n")
            assert "Traceback" not in terminal.seen
