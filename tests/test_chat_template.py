"""A chat template is code from a stranger: what it may do, and what stops it."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_ort.errors import BundleError, DFlashError, RequestError
from dflash_ort.params import SamplingParams
from dflash_ort.runtime.chat_template import ChatTemplate
from dflash_ort.runtime.engine import Engine

USER = [{"role": "user", "content": "hello"}]
DOUBLING = (
    "{% set ns = namespace(x=START) %}{% for i in range(60) %}{% set ns.x = ns.x OP ns.x %}{% endfor %}{{ ns.x }}"
)


def render(source: str, messages: Any = USER, *, seconds: float = 5.0, **arguments: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, max_seconds=seconds).render(
        messages, arguments
    )


def refusal(source: str, messages: Any = USER, *, seconds: float = 5.0) -> str:
    """The one line that a template which must not render is refused with."""
    with pytest.raises((RequestError, BundleError)) as caught:
        render(source, messages, seconds=seconds)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__['__builtins__'] }}",
        "{{ strftime_now.__globals__.ctypes }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ '{0.__class__.__mro__}'.format('') }}{{ ''.__class__.mro() }}",
        "{{ '{0.__init__.__globals__}'.format(raise_exception) }}",
        "{{ (''|attr('__class__')).mro() }}",
        "{{ messages.append(1) }}",
        "{% set _ = messages[0].update({'content': 'x'}) %}",
        "{{ messages[0].pop('content') }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_escapes_from_the_sandbox_are_refused(source: str) -> None:
    assert "refused" in refusal(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% for i in range(100000) %}{% for j in range(100000) %}{% if i == j %}{% endif %}{% endfor %}{% endfor %}",
        "{{ lipsum(n=100000) }}",
    ],
)
def test_a_loop_without_end_is_interrupted(source: str) -> None:
    assert "did not finish in 0.2 seconds" in refusal(source, seconds=0.2)
    assert render("{{ messages[0].content }}", seconds=0.2) == "hello", "nothing of the interruption is left behind"


def test_only_the_rendering_thread_is_interrupted() -> None:
    """Several requests render at once; one runs out of time, the others do not."""
    results: dict[int, str] = {}

    def work(i: int) -> None:
        loop = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
        short = "{% for i in range(3000) %}x{% endfor %}"
        try:
            results[i] = render(loop if i == 0 else short, seconds=0.3 if i == 0 else 30.0)[:1]
        except RequestError as error:
            results[i] = str(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "did not finish" in results.pop(0)
    assert results == {1: "x", 2: "x", 3: "x"}


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10**9 }}",
        "{{ 10**9 * 'a' }}",
        "{{ (1, 2) * 10**9 }}",
        "{{ ('a' * 1000000) * 1000000 }}",
        "{{ 'a'.ljust(10**9) }}",
        "{{ '1'.zfill(10**9) }}",
        "{{ 'a'|center(10**9) }}",
        "{{ 'a\n'|indent(10**9) }}",
        "{{ '{:1000000000}'.format('a') }}",
        "{{ '{:{}}'.format('a', 1000000000) }}",
        "{{ '{:{}}'.format('a', '1000000000') }}",
        "{{ '{a:1000000000}'.format_map({'a': 'b'}) }}",
        "{{ '%1000000000d' % 5 }}",
        "{{ '%*d' % (1000000000, 5) }}",
        "{{ '%1000000000d'|format(5) }}",
        "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
        "{{ ('a' * 1000000)|replace('a', 'b' * 1000000) }}",
        "{{ 'aaaaaaaaaa'" + "|replace('a', 'aaaaaaaaaa')" * 12 + " }}",
        "{{ range(100000)|join('a' * 1000000) }}",
        "{{ ('a' * 1000000).join(['b'] * 100000) }}",
        "{{ ('\t' * 1000000).expandtabs(1000000) }}",
        "{{ ('a' * 1000000).translate({97: 'b' * 1000000}) }}",
        "{{ [[[[1]]]]|tojson(indent=10**9) }}",
        "{{ range(10**9)|list }}",
        "{{ 10 ** 10 ** 10 }}",
        "{{ 2 ** (10 ** 9) }}",
        "{% for i in range(100000) %}{{ 'a' * 1000 }}{% endfor %}",
        DOUBLING.replace("START", "'a' * 1000").replace("OP", "+"),
        DOUBLING.replace("START", "[1, 2, 3]").replace("OP", "+"),
        DOUBLING.replace("START", "10 ** 6").replace("OP", "*"),
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_much_out_of_little_is_refused(source: str) -> None:
    """Before it is made: the output itself would be small."""
    if source.startswith("{{ ") and "**" not in source.split("'")[0]:
        source = source.replace("{{ ", "{{ (").replace(" }}", ")|length }}")
    message = refusal(source)
    assert "did not finish" not in message
    assert "MemoryError" not in message


@pytest.mark.parametrize("content", ["50% of {1234567} and %9999999d", "{:{}} %*d " * 3, "a\tb" * 1000])
def test_what_a_user_writes_is_not_taken_for_a_pattern(content: str) -> None:
    message = [{"role": "user", "content": content}]
    assert render("{{ messages[0].content.strip() }}", message) == content.strip()
    assert render("{{ messages[0].content|indent(2) }}", message) == content
    assert render("{{ messages[0]['content'].split('</think>')[-1] }}", message) == content
    assert render("{{ '%s: %s' % ('user', messages[0].content) }}", message) == f"user: {content}"
    assert render("{{ '{}'.format(messages[0].content) }}", message) == content


@pytest.mark.parametrize(
    "source",
    [
        "{% if %}",
        "{{ 'a'|no_such_filter }}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ " + "[" * 300 + "]" * 300 + " }}",
        "{% if 1 %}" * 200 + "{% endif %}" * 200,
    ],
    ids=["syntax", "filter", "parentheses", "lists", "blocks"],
)
def test_a_template_that_cannot_be_read_is_a_bundle_error(source: str) -> None:
    with pytest.raises(BundleError, match=r"^the chat template cannot be read: .*export again, or pass raw$"):
        ChatTemplate(source, {})


def test_a_template_can_refuse_in_its_own_words() -> None:
    source = "{% if messages[0].role != 'user' %}{{ raise_exception('start with\n  a user message') }}{% endif %}ok"
    assert render(source) == "ok"
    refused = refusal(source, [{"role": "system", "content": "x"}])
    assert refused == "the chat template refused the messages: start with a user message"
    assert "is undefined" in refusal("{{ nothing.at.all }}")


def test_what_chat_templates_in_use_need_works() -> None:
    """Loop controls, namespaces, tojson without HTML escapes, trimmed blocks, dates, tokens by name."""
    source = (
        "{{ bos_token }}{% set ns = namespace(n=0) %}\n"
        "{%- for message in messages %}\n"
        "    {%- if message.role == 'tool' %}{% continue %}{% endif %}\n"
        "    {%- set ns.n = ns.n + 1 %}\n"
        "    {%- if loop.last %}{{ message | tojson }}{% break %}{% endif %}\n"
        "{%- endfor %}\n"
        "|{{ ns.n }}|{{ strftime_now('%Y')|length }}|{{ {'b': '<&é>', 'a': 1}|tojson(indent=2) }}|{{ eos_token }}"
    )
    messages = [{"role": "tool", "content": ""}, {"role": "user", "content": "<é>"}]
    expected = '<s>{"role": "user", "content": "<é>"}\n|1|4|{\n  "b": "<&é>",\n  "a": 1\n}|</s>'
    assert render(source, messages).replace("\n|1", "|1") == expected.replace("\n|1", "|1")


def test_arguments_reach_the_template_and_win_over_defaults() -> None:
    source = "{{ enable_thinking }} {{ add_generation_prompt }} {{ bos_token }} {{ messages|length }}"
    assert render(source, enable_thinking=False) == "False True <s> 1"
    assert render(source, add_generation_prompt=False, bos_token="B") == " False B 1"
    template = ChatTemplate(source, {})
    assert template.render(USER, {"messages": []}) == " True  1", "but they cannot replace the messages"


# In the engine ----------------------------------------------------------------


@pytest.fixture
def bundle(tiny_bundle: Callable[..., Path], tmp_path: Path) -> Callable[[str], Path]:
    """A bundle with another chat template in it."""

    def make(source: str) -> Path:
        directory = tmp_path / "bundle"
        shutil.copytree(tiny_bundle("fp32"), directory)
        size = (directory / "chat_template.jinja").stat().st_size
        (directory / "chat_template.jinja").write_text(source.ljust(size)[:size] if len(source) <= size else source)
        return directory

    return make


def test_the_engine_passes_arguments_on(bundle: Callable[[str], Path]) -> None:
    with Engine.load(bundle("{{ 'x' * n }}{{ messages[0].content }}")) as engine:
        params = SamplingParams(max_new_tokens=1)
        counts = [engine.generate("ab", params, template_arguments={"n": n}).statistics.prompt_tokens for n in (0, 3)]
        assert counts[1] - counts[0] == 3
        assert engine.generate("ab", params, raw=True).statistics.prompt_tokens == 2
        with pytest.raises(RequestError, match="the chat template refused the messages"):
            engine.generate("ab", params, template_arguments={"n": 10**9})
        assert engine.generate("ab", params, template_arguments={"n": 1}).token_ids


def test_the_engine_reports_a_broken_template_when_it_loads(bundle: Callable[[str], Path]) -> None:
    with pytest.raises(DFlashError, match=r"^the chat template cannot be read: [^\n]*$") as caught:
        Engine.load(bundle("{% if %}"))
    assert isinstance(caught.value, BundleError)
