"""What a template may name and how much it may do; all else is what transformers makes of it."""

import resource
import time

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

import engine.template_budget
from engine.chat_template import ChatTemplate, ChatTemplateError
from engine.sampling_params import ParameterError

NAMES = {"bos_token": "<s>", "eos_token": "</s>"}


def user(content):
    return [{"role": "user", "content": content}]


def talk(*contents):
    roles = ["user", "assistant"]
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__['__builtins__'] }}",
        "{{ (messages | attr('__class__')) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ lipsum.__globals__['os'] }}",
        "{{ raise_exception.__globals__ }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{% set _ = messages.append(1) %}",
        "{% for i in range(99999999) %}{% endfor %}",
    ],
)
def test_a_template_that_reaches_out_of_its_sandbox_fails_by_name(source):
    with pytest.raises(ParameterError, match="template") as refused:
        ChatTemplate(source, NAMES).render(user("x"))
    assert refused.value.param == "messages"


LOOPS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% if i < 0 %}x{% endif %}{% endfor %}"
    "{% endfor %}",
    "{% macro spin(n) %}{% for i in range(99999) %}{% if n %}{{ spin(n - 1) }}{% endif %}"
    "{% endfor %}{% endmacro %}{{ spin(9) }}",
    "{% macro twice(n) %}{% if n %}{{ twice(n - 1) }}{{ twice(n - 1) }}{% endif %}{% endmacro %}"
    "{{ twice(60) }}",
    "{% for i in range(99999) recursive %}{{ loop(range(99999)) }}{% endfor %}",
]


@pytest.mark.parametrize("source", LOOPS, ids=range(len(LOOPS)))
def test_a_rendering_that_prints_nothing_ends_all_the_same(monkeypatch, source):
    monkeypatch.setattr(engine.template_budget, "RENDER_LIMIT_S", 0.2)
    began = time.monotonic()
    with pytest.raises(ParameterError, match=r"took more than 0\.2 seconds|recursion"):
        ChatTemplate(source, NAMES).render(user("hi"))
    assert time.monotonic() - began < 5
    assert ChatTemplate("{{ messages[0].content }}", NAMES).render(user("hi")) == "hi"


@pytest.mark.parametrize(
    "source",
    ["{{ 'a' * 10 ** 9 }}", "{{ 10 ** 9 * 'a' }}", "{{ [1] * 10 ** 9 }}", "{{ 9 ** 99999 }}"],
)
def test_a_value_made_by_multiplication_is_bounded(source):
    with pytest.raises(ParameterError, match="over the limit of"):
        ChatTemplate(source, NAMES).render(user("hi"))
    assert ChatTemplate("{{ '=' * 20 ~ 3 * 4 ~ 2 ** 10 }}", NAMES).render(user("hi")) == (
        "=" * 20 + "12" + "1024"
    )


BIG = "{% set b = 'a' * 1000000 %}"
DOUBLING = (
    "{% set ns = namespace(x=BEGIN) %}{% for i in range(60) %}{% set ns.x = STEP %}{% endfor %}"
)
GREEDY = [
    "{{ 'a'|center(10 ** 11) }}",
    "{{ messages[0].content.ljust(100000000000) }}",
    "{{ 'a'.zfill(100000000000) }}",
    "{{ '%0100000000000d'|format(1) }}",
    "{{ '%*d'|format(100000000000, 1) }}",
    "{{ '%0100000000000d' % 1 }}",
    "{{ '{:>100000000000}'.format(1) }}",
    "{{ '{:>{w}}'.format(1, w=100000000000) }}",
    BIG + "{{ '%s%s%s%s%s%s%s%s%s%s%s%s%s%s%s%s%s%s' % (b,) }}",
    "{{ 'a'|indent(100000000000, true) }}",
    BIG + "{{ b.replace('a', b)|length }}",
    BIG + "{{ b|replace('a', b)|length }}",
    BIG + "{{ b.replace('', b)|length }}",
    BIG + "{{ ([b] * 1000000)|join|length }}",
    BIG + "{{ b.join(b)|length }}",
    BIG + "{{ b.join(range(99999)|map('string'))|length }}",
    BIG + "{{ range(99999)|map('default', b)|map('replace', '1', b)|join(b) }}",
    "{{ [1]|tojson(indent=100000000000) }}",
    BIG + "{{ [[[1]]]|tojson(indent=b) }}",
    "{{ [1]|tojson(separators=('a' * 1000000, '')) * 1000000 }}",
    "{{ ([('a',) * 1000] * 100000)|sum(start=())|length }}",
    "{{ 1|round(100000000000, 'ceil') }}",
    "{{ ('f' * 1000000)|int(0, 16) }}",
    "{{ strftime_now('%0100000000Y') }}",
    DOUBLING.replace("BEGIN", "'a'").replace("STEP", "ns.x ~ ns.x"),
    DOUBLING.replace("BEGIN", "'a'").replace("STEP", "ns.x + ns.x"),
    DOUBLING.replace("BEGIN", "[0]").replace("STEP", "ns.x + ns.x"),
    DOUBLING.replace("BEGIN", "[0]").replace("STEP", "[ns.x, ns.x]") + "{{ ns.x }}",
    DOUBLING.replace("BEGIN", "(0,)").replace("STEP", "(ns.x, ns.x)") + "{{ {ns.x: 1} }}",
    DOUBLING.replace("BEGIN", "0").replace("STEP", "{'a': ns.x, 'b': ns.x}") + "{{ ns.x }}",
    DOUBLING.replace("BEGIN", "0").replace("STEP", "dict(a=ns.x, b=ns.x)") + "{{ ns.x }}",
    DOUBLING.replace("BEGIN", "3").replace("STEP", "ns.x * ns.x"),
    DOUBLING.replace("BEGIN", "'a'").replace(
        "{% set ns.x = STEP %}", "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"
    ),
    BIG + "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% else %}{{ b }}{% endif %}"
    "{% endmacro %}{% set x = f(40) %}",
    BIG + "{% for i in range(99999) %}{% set x = b ~ i %}{% endfor %}",
    BIG + "{% for i in range(99999) %}{% set x = [b, i]|string %}{% endfor %}",
    BIG + "".join(f"{{% set x{i} = b ~ {i} %}}" for i in range(1000)),
    "{% set x = ('a ' * 500000).split() %}" * 100,
    "{% block a %}{{ self.b() }}{{ self.b() }}{% endblock %}"
    "{% block b %}{{ self.a() }}{{ self.a() }}{% endblock %}",
    "{% set tick = namespace %}{% set _tick = namespace %}" + LOOPS[0],
]


@pytest.mark.parametrize("source", GREEDY, ids=range(len(GREEDY)))
def test_what_makes_much_of_little_is_refused_before_it_is_made(monkeypatch, source):
    monkeypatch.setattr(engine.template_budget, "RENDER_LIMIT_S", 1.0)
    template = ChatTemplate(source, NAMES)
    began = time.monotonic()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(
        ParameterError, match=r"over the limit of|took more than|width|recursion|sum"
    ):
        template.render(user("hi"))
    assert time.monotonic() - began < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600 << 10


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("{{ lipsum(n=100000000) }}", "function 'lipsum'"),
        ("{{ ('a' * 1000000)|wordwrap(1)|length }}", "filter 'wordwrap'"),
        ("{{ [1]|slice(100000000000)|list|length }}", "filter 'slice'"),
        ("{{ [1]|batch(100000000000, 'x')|list }}", "filter 'batch'"),
        ("{{ ['a']|map('urlize')|list }}", "filter 'urlize'"),
        ("{{ 'a'|pprint }}", "filter 'pprint'"),
        ("{{ 'a'.translate({97: 'b' * 1000000}) }}", "method 'translate'"),
        ("{{ '\t'.expandtabs(100000000000) }}", "method 'expandtabs'"),
        ("{{ 'a'.encode() * 100000000000 }}", "method 'encode'"),
        ("{{ (1).to_bytes(100000000000, 'big') }}", "method 'to_bytes'"),
        ("{{ 'a' is nothing_known }}", "test 'nothing_known'"),
        ("{% include '/etc/passwd' %}", "tag 'include'"),
        ("{% import 'os' as os %}", "tag 'import'"),
        ("{% autoescape true %}{{ '&' * 1000000 }}{% endautoescape %}", "evalcontextmodifier"),
    ],
)
def test_what_is_not_for_templates_is_refused_by_name_at_load(source, name):
    with pytest.raises(ChatTemplateError, match=f"line 1: the .*{name}.* is not among those"):
        ChatTemplate(source, NAMES)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("{{ ''['translate']({97: 'b'}) }}", "str.translate"),
        ("{{ (''|attr('encode'))() }}", "str.encode"),
        ("{{ (1)['to_bytes'](100000000000, 'big') }}", "to_bytes"),
        ("{{ messages.append(1) }}", "'append' of list"),
        ("{{ messages[0].update(a=1) }}", "'update' of dict"),
    ],
)
def test_a_method_called_some_other_way_is_refused_by_name(source, name):
    with pytest.raises(ChatTemplateError, match=f"sandbox forbids: .*{name}"):
        ChatTemplate(source, NAMES).render(user("x"))


SOUND = [
    "{% for m in messages[1:] %}{{ loop.index }}"
    "{{ m.role|upper ~ ':' }}{{ m['content'] }}{% endfor %}",
    "{{ (messages|selectattr('role', 'equalto', 'user')|list|last).content|trim }}",
    "{{ messages|rejectattr('role', 'in', ['user'])|map(attribute='content')|join(', ') }}",
    "{{ messages|map(attribute='role')|unique|sort|join('|') }}{{ messages|length }}",
    "{{ messages[0].content.split('o')[-1].strip('l').lstrip().rstrip('\\n') }}",
    "{{ messages[0].content.startswith('H') and messages[0]['content'].endswith(('o', 'x')) }}",
    "{{ messages[0].content|replace('l', 'L')|title }}{{ 'ab'.replace('b', 'c').upper() }}",
    "{% set ns = namespace(found=false, n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% if m.role == 'user' and not ns.found %}{% set ns.found = true %}{% endif %}{% endfor %}"
    "{{ ns.n }}{{ ns.found }}{{ ns.n % 2 == 0 }}",
    "{% for k, v in messages[0].items() %}{{ k }}={{ v|tojson }};{% endfor %}",
    "{% for k, v in messages[0]|dictsort %}{{ k }}={{ v }};{% endfor %}"
    "{{ messages[0]|items|list }}",
    "{{ messages[0].get('name', 'none') }}{{ 'role' in messages[0] }}{{ messages[0].keys()|list }}",
    "{{ {'a': [1, 2.5, none, true], 'b': {'c': 'é<'}}|tojson(indent=2) }}",
    "{{ 'a\nb\nc'|indent(4, first=true) }}{{ ['x', 'y'] + ['z'] }}{{ ('a', 'b')[::-1] }}",
    "{{ '%s and %05.2f' % ('x', 2.5) }}{{ '%s!'|format('y') }}{{ '{}-{:>4}'.format(1, 'b') }}",
    "{{ [3, 1, 2]|sort|first }}{{ [1, 2]|sum }}{{ range(3)|list }}{{ 7 // 2 }}{{ 2.567|round(1) }}",
    "{% macro m(x, y='d') %}<{{ x }}{{ y }}{{ caller() if caller else '' }}>{% endmacro %}"
    "{{ m('a') }}{% call m('b') %}in{% endcall %}{{ m('c') ~ '!' }}",
    "{% set x %}a{{ 1 }}{% endset %}{{ x * 2 }}{{ x|length }}{{ undefined_thing is defined }}",
    "{% filter upper %}abc{% endfilter %}"
    "{{ 'x' if messages is sequence and messages is not string }}",
    "{% for m in messages recursive %}{{ m.role }}{% if loop.first %}"
    "{{ loop([m]) if loop.depth < 3 }}"
    "{% endif %}{% endfor %}{{ loop is defined }}",
    "{% for x in [1, 1, 2] %}{% if loop.changed(x) %}{{ x }}{% endif %}{{ loop.cycle('a', 'b') }}"
    "{% else %}none{% endfor %}{{ '<a>'|e }}{{ '<b>'|safe }}{{ ('<c>'|safe) + '<d>' }}",
    "{% if messages|select %}generator{% endif %}{{ 'a' ~ none ~ 1.0 ~ [1] }}{{ {'a': 1}.a }}",
    "{% set j = joiner(', ') %}{% for m in messages %}{{ j() }}{{ m.role }}{% endfor %}"
    "{% set c = cycler('o', 'e') %}{{ c.next() }}{{ c.next() }}{{ c.current }}",
    "{{ 'abc'[1:] }}{{ 'abc'|reverse }}{{ 'a b'.split()|last }}{{ 'x'.center(5) }}"
    "{{ '5'|int + 1 }}",
    "{{ messages|groupby('role')|map(attribute='grouper')|list }}{{ (1, 2) in [(1, 2)] }}",
]


@pytest.mark.parametrize("source", SOUND, ids=range(len(SOUND)))
def test_what_templates_do_is_what_transformers_makes_of_it(source):
    chat = talk("Hello", " there ", "x\ny")
    expected, _ = render_jinja_template([chat], chat_template=source)
    assert ChatTemplate(source, NAMES).render(chat) == expected[0]


def test_a_very_long_chat_is_within_the_budget():
    chat = talk(*("word " * 200 for _ in range(3000)))
    source = (
        "{% set ns = namespace(last=0, kept=[]) %}{% for m in messages %}"
        "{% set ns.kept = ns.kept + [m] if loop.index0 < 500 else ns.kept %}"
        "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}{% set content = m.content.split('</think>')[-1].lstrip('\\n') %}"
        "{{ '<|im_start|>' + m.role + '\\n' + content|trim ~ '<|im_end|>' }}{% endfor %}"
    )
    text = ChatTemplate(source, NAMES).render(chat)
    assert text.count("<|im_start|>") == 3000
    assert "word word" in text


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{% for i in [1] %}" * 30 + "{% endfor %}" * 30,
        "{% if 1 %}" * 500 + "{% endif %}" * 500,
        "{{ " + "9" * 5000 + " }}",
        "{{ " + "1+" * 20_000 + "1 }}",
        "a" * 20_000_000,
        "{{ 1|nothing_known }}",
        "{{ '" + "\\x" + "' }}",
    ],
    ids=range(8),
)
def test_whatever_keeps_a_template_from_compiling_is_named(source):
    with pytest.raises(ChatTemplateError, match=r"chat template (does not compile|has 20000000)"):
        ChatTemplate(source, NAMES)


def test_nothing_of_a_template_runs_before_a_rendering():
    template = ChatTemplate("{{ 1 // 0 }}{{ 'a'|center(2 ** 40) }}", NAMES)
    with pytest.raises(ParameterError, match="division"):
        template.render(user("x"))
