//! The evaluator of templates: results like Python's, origins through every filter and method, bounds on work, memory
//! and depth. The expected texts are those of jinja2 with the settings of the `transformers` library.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use pellucid_tokenizer::{ChatTemplate, Conversation, Error, MemoryGrant, RenderLimits, Segment, Tokenizer, message};
use proptest::prelude::*;
use serde_json::{Map, Value, json};

use crate::common;

fn tokenizer() -> Tokenizer {
    Tokenizer::from_hugging_face(&common::fixture("llama3")).unwrap()
}

fn render_with(source: &str, extra: &Value, limits: Option<RenderLimits<'_>>) -> Result<Vec<Segment>, Error> {
    let template = ChatTemplate::compile(source, &tokenizer())?;
    let messages = [message("user", "привет мир")];
    let conversation = Conversation { messages: &messages, extra: extra.as_object(), ..Conversation::default() };
    match limits {
        Some(limits) => template.render_within(&conversation, limits),
        None => template.render(&conversation),
    }
}

fn text(segments: &[Segment]) -> String {
    segments.iter().map(|segment| segment.text.as_str()).collect()
}

/// Expressions and their results in Python.
const RESULTS: &[(&str, &str)] = &[
    ("1 + 2 * 3 ** 2 // 4 % 5", "5"),
    ("-7 // 2, -7 % 3, 7 / 2, 2 ** -1", "(-4, 2, 3.5, 0.5)"),
    ("1e16, 1e15, 0.0001, 0.00001, -0.0, 1.0", "(1e+16, 1000000000000000.0, 0.0001, 1e-05, -0.0, 1.0)"),
    ("true, none, 'it\\'s', \"q\\\"\", '\\x07\\u200b'", "(True, None, \"it's\", 'q\"', '\\x07\\u200b')"),
    ("{'a': [1, (2,)], 'b': {}}", "{'a': [1, (2,)], 'b': {}}"),
    ("'a' 'b' ~ 1 ~ none ~ nothing ~ true", "ab1NoneTrue"),
    ("1 < 2 <= 2 != 3", "True"),
    ("'b' in 'abc' and 2 not in [1] and 'x' in {'x': 1}", "True"),
    ("'abcdef'[1:-1:2], 'abc'[::-1], [1,2,3][-2:]", "('bd', 'cba', [2, 3])"),
    ("'  x y  '.strip() ~ '|' ~ 'xxabx'.strip('x') ~ '|' ~ 'a,b,,c'.split(',')", "x y|ab|['a', 'b', '', 'c']"),
    (
        "' a  b '.split(), ' a  b c '.split(none, 1), 'a b c'.rsplit(' ', 1)",
        "(['a', 'b'], ['a', 'b c '], ['a b', 'c'])",
    ),
    ("'aXbX'.replace('X', '', 1), 'ab'.replace('', '-')", "('abX', '-a-b-')"),
    ("'%s|%5.2f|%-4d|%04d|%x|%%' | format('a', 3.14159, 7, 42, 255)", "a| 3.14|7   |0042|ff|%"),
    ("'{}-{1}-{n:>4}|{:,}'.format(1, 2, 1234567, n='z') if false else '{:,}'.format(1234567)", "1,234,567"),
    ("'a\\nb\\n\\nc' | indent(2)", "a\n  b\n\n  c"),
    ("{'b': 1, 'a': [true, none, 1.5, 'é\"\\n<']} | tojson", "{\"b\": 1, \"a\": [true, null, 1.5, \"é\\\"\\n<\"]}"),
    (
        "{'b': 1, 'a': 'é'} | tojson(indent=1, sort_keys=true, ensure_ascii=true)",
        "{\n \"a\": \"\\u00e9\",\n \"b\": 1\n}",
    ),
    ("[3, 1, 2] | sort(reverse=true) | join('-')", "3-2-1"),
    (
        "['b', 'A', 'a'] | unique | list, ['b', 'A'] | sort, 'hello world-x' | title",
        "(['b', 'A'], ['A', 'b'], 'Hello World-X')",
    ),
    ("[{'n': 1}, {'n': 2}] | selectattr('n', 'gt', 1) | map(attribute='n') | list", "[2]"),
    ("{'b': 1, 'a': 2} | dictsort, {'a': 1}.items() | list", "([('a', 2), ('b', 1)], [('a', 1)])"),
    ("[1, 2, 3] | batch(2, 'x') | list, [1, 2, 3] | slice(2) | list", "([[1, 2], [3, 'x']], [[1, 2], [3]])"),
    ("'<b>' | safe + '<i>'", "<b>&lt;i&gt;"),
    ("nothing | default('d') ~ ('' | default('e', true)) ~ (none | default('f'))", "deNone"),
    ("'12' | int + 1, '1.9' | int, 'x' | int(5), 2.5 | round, 2.675 | round(2)", "(13, 1, 5, 2.0, 2.67)"),
    ("1 is number and true is number and true is not integer and 'a' is string and {} is mapping", "True"),
    ("({'items': 1}).items is callable, {'items': 1}['items']", "(True, 1)"),
    ("((-2) ** 127) is divisibleby(-1)", "True"),
    ("'x' if false", ""),
];

#[test]
fn results_are_those_of_python() {
    for (expression, expected) in RESULTS {
        let found = render_with(&format!("{{{{ {expression} }}}}"), &json!({}), None);
        assert_eq!(text(&found.unwrap_or_else(|error| panic!("{expression}: {error}"))), *expected, "{expression}");
    }
}

/// Statements and their output.
const OUTPUTS: &[(&str, &str)] = &[
    ("a\n  {% if true %}\n b\n  {% endif %}\nc\n", "a\n b\nc"),
    ("a\n  {%- if true -%} \n b {%- endif +%}\n{{ 1 }}\n\n", "ab\n1\n"),
    ("a{# x #}\nb  {#- y -#}  c\n  {%+ if true %}d{% endif %}", "ab"),
    ("{% raw %}{{ x }}{% endraw %}\n{% set a, b = 1, [2] %}{{ a }}{{ b }}", "{{ x }}1[2]"),
    ("{% for x in [1, 2, 3] if x != 2 %}{{ loop.index }}/{{ loop.length }}{{ x }}{% else %}-{% endfor %}", "1/212/23"),
    (
        "{% for x in [1, 2, 3, 4] %}{% if x == 2 %}{% continue %}\
         {% elif x == 4 %}{% break %}{% endif %}{{ x }}{% endfor %}",
        "13",
    ),
    (
        "{% set x = 1 %}{% for i in [1] %}{% set x = 2 %}{% endfor %}{{ x }}\
         {% if true %}{% set x = 3 %}{% endif %}{{ x }}",
        "13",
    ),
    ("{% set n = namespace(x=1) %}{% for i in [1, 2] %}{% set n.x = n.x + i %}{% endfor %}{{ n.x }}", "4"),
    (
        "{% macro f(a, b=2) %}{{ a }}{{ b }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ f(1) }}{{ f(1, 3, 4, z=5) }}",
        "12(){}13(4,){'z': 5}",
    ),
    ("{% macro f() %}<{{ caller('x') }}>{% endmacro %}{% call(y) f() %}{{ y }}{% endcall %}", "<x>"),
    (
        "{% for x in [1, [2, [3]]] recursive %}\
         {% if x is iterable %}({{ loop(x) }}){% else %}{{ x }}{% endif %}{% endfor %}",
        "1(2(3))",
    ),
    (
        "{% set x %} a{{ 1 }}{% endset %}{{ x | length }}\
         {% filter upper %}b{% endfilter %}{% with y = 3 %}{{ y }}{% endwith %}",
        "3B3",
    ),
    (
        "{% generation %}a{% endgeneration %}\nb{% for c in 'ab' %}\
         {{ loop.previtem }}{{ c }}{{ loop.nextitem }} {% endfor %}",
        "abab ab ",
    ),
];

#[test]
fn statements_run_as_in_jinja() {
    for (source, expected) in OUTPUTS {
        let found = text(&render_with(source, &json!({}), None).unwrap_or_else(|error| panic!("{source}: {error}")));
        if source.starts_with("a{#") {
            assert_eq!(found, "abc\n  d", "{source}");
            continue;
        }
        assert_eq!(found, *expected, "{source}");
    }
}

/// Every character is trusted if the template wrote it, whatever was done with it. `т` is text of the request.
#[test]
fn origins_follow_every_character() {
    let t = |text: &str| Segment::trusted(text);
    let u = |text: &str| Segment::untrusted(text);
    let cases: &[(&str, Vec<Segment>)] = &[
        ("'<' + т + '>'", vec![t("<"), u("ab"), t(">")]),
        ("('<' ~ т ~ '>').replace('a', '')", vec![t("<"), u("b"), t(">")]),
        ("('<|' + т + '|>').split('a') | join('')", vec![t("<|"), u("b"), t("|>")]),
        ("т.replace('a', 'X')", vec![t("X"), u("b")]),
        ("'%s!' | format(т)", vec![u("ab"), t("!")]),
        ("'{}!{x}'.format(т, x='y')", vec![u("ab"), t("!y")]),
        ("[т, 'c'] | join('-')", vec![u("ab"), t("-c")]),
        ("('x' + т) | upper", vec![t("X"), u("AB")]),
        ("('x' + т) | title", vec![t("X"), u("ab")]),
        ("('x' + т)[::-1]", vec![u("ba"), t("x")]),
        ("('x' + т)[:2] + 'y'", vec![t("x"), u("a"), t("y")]),
        ("т | tojson", vec![u("\"ab\"")]),
        ("[т, 'c']", vec![u("['ab', '"), t("c"), u("']")]),
        ("n ~ 1 ~ (n + 1) ~ (1 + 1)", vec![u("1"), t("1"), u("2"), t("2")]),
        ("d.keys() | first ~ 'x'", vec![u("k"), t("x")]),
        ("(d | items | list)[0][0] ~ {'k': 'v'}[d.keys() | first]", vec![u("k"), t("v")]),
        ("('a\n' + т) | indent(1)", vec![t("a"), u("\n ab")]),
        ("т | length ~ true", vec![u("2True")]),
        ("(dict(**d) | list)[0] ~ (dict(k=1) | list)[0]", vec![u("k"), t("k")]),
        ("[т] | map('upper') | join | lower", vec![u("ab")]),
        ("'a'.join(т)", vec![u("a"), t("a"), u("b")]),
        ("т.center(4) ~ т.rjust(3, '*')", vec![u(" ab "), t("*"), u("ab")]),
        ("('<b>' | safe) + т + '<'", vec![t("<b>"), u("ab&lt;")]),
        ("'<|im' ~ ('_end' | trim) ~ '|>'", vec![t("<|im_end|>")]),
        ("('<' + т + ' c>') | wordwrap(3)", vec![t("<"), u("ab\n"), t("c>")]),
        ("('x&lt;' + т) | striptags", vec![t("x<"), u("ab")]),
        ("('a ' + т) | urlencode ~ {'k': т} | xmlattr", vec![t("a"), u("%20ab "), t("k"), u("=\"ab\"")]),
    ];
    let extra = json!({ "т": "ab", "n": 1, "d": { "k": "v" } });
    for (expression, expected) in cases {
        let found = render_with(&format!("{{{{ {expression} }}}}"), &extra, None).unwrap();
        assert_eq!(found, *expected, "{expression}");
    }
    let blocks = "{% macro m(x) %}<{{ x }}>{% endmacro %}{% set b %}[{{ т }}]{% endset %}{% set ns = namespace(s='') %}\
        {% for c in т %}{% set ns.s = ns.s + c + '.' %}{% endfor %}{{ m(т) }}{{ b }}{{ ns.s }}";
    let found = render_with(blocks, &extra, None).unwrap();
    let expected = [t("<"), u("ab"), t(">["), u("ab"), t("]"), u("a"), t("."), u("b"), t(".")];
    assert_eq!(found, expected);
}

/// Templates that would take all memory or run for hours.
const BOMBS: &[&str] = &[
    "{{ 'a\nb' | indent(10**9) }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ '%.1000000000f' | format(1.5) }}",
    "{{ '{:>1000000000}'.format('x') }}",
    "{{ '{:.1000000000f}'.format(1.0) }}",
    "{{ 'x'.center(10**10) }}",
    "{{ 'x'.ljust(10**18) }}",
    "{{ '\t'.expandtabs(10**12) }}",
    "{{ 'x' * 10**12 }}",
    "{{ [0] * 10**12 }}",
    "{{ [1] | batch(10**9, 'x') | list }}",
    "{{ [1] | slice(10**9) | list }}",
    "{{ range(10**9) }}",
    "{{ range(0 - 10**30, 10**30) }}",
    "{{ 10 ** 10 ** 10 }}",
    "{{ {'a': [1]} | tojson(indent=10**9) }}",
    "{% set ns = namespace(x='ab') %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(40) %}{% set ns.x = ns.x | replace('', ns.x) %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(40) %}{% set ns.x = ns.x.join(ns.x) %}{% endfor %}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x={'a': 1}) %}{% for i in range(99999) %}\
         {% set ns.x = dict(ns.x, **{i ~ '': i}) %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{{ 'x' * 10000 }}{% endfor %}",
    "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for x in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}",
    "{% set ns = namespace(x='') %}{% for i in range(99999) %}{% set ns.x = 'y' * 99 + ns.x %}{% endfor %}",
    "{% set x = 'ab' * 999999 %}{% for i in range(99999) %}{% if x == 'ab' * 999999 %}{% endif %}{% endfor %}",
    "{% set x = 'ab' * 999999 %}{% for i in range(99999) %}{{ x | length }}{% endfor %}",
    "{% for i in range(99999) %}{% set ns = namespace(a=range(1000)) %}{% endfor %}{% for i in range(99999) %}\
     {% set ns = namespace(a=range(1000)) %}{% endfor %}",
];

#[test]
fn work_and_memory_are_bounded() {
    for source in BOMBS {
        let result = render_with(source, &json!({}), None);
        assert!(result.is_err(), "{source}: {:?}", result.map(|segments| text(&segments).len()));
    }
}

#[test]
fn the_deepest_recursion_fits_a_small_stack() {
    let nested = |open: &str, close: &str, count: usize| format!("{}1{}", open.repeat(count), close.repeat(count));
    let mut sources = vec![
        "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}".to_owned(),
        "{% macro f(n) %}{% for a in [[1]] %}{% if a %}{{ [f(n + 1)] | map('upper') | join }}{% endif %}{% endfor %}\
         {% endmacro %}{{ f(0) }}"
            .to_owned(),
        "{% for x in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}".to_owned(),
        "{% macro f() %}{% call f() %}{{ caller() }}{% endcall %}{% endmacro %}{% call f() %}{% endcall %}".to_owned(),
        format!("{}{}", "{% if true %}".repeat(5000), "{% endif %}".repeat(5000)),
        format!("{{{{ x{} }}}}", " | string".repeat(5000)),
        format!("{{{{ x{} }}}}", ".a".repeat(5000)),
        format!("{{{{ 1{} }}}}", " if 1 else 2".repeat(5000)),
        format!("{{{{ {}1 }}}}", "not ".repeat(5000)),
        format!("{{{{ {}1 }}}}", "-".repeat(5000)),
    ];
    for (open, close) in [("(", ")"), ("[", "]"), ("{1:", "}"), ("f(", ")"), ("x[", "]"), ("(1, ", ")")] {
        sources.push(format!("{{{{ {} }}}}", nested(open, close, 5000)));
        for count in [40, 60, 80, 95] {
            sources.push(format!("{{{{ {} }}}}", nested(open, close, count)));
        }
    }
    // A macro that recurses through the deepest expression that the parser accepts.
    sources.push(format!("{{% macro f() %}}{{{{ {} }}}}{{% endmacro %}}{{{{ f() }}}}", nested("[", "+[f()]]", 40)));
    let run = move || {
        for source in &sources {
            let _ = render_with(source, &json!({}), None);
        }
    };
    // Threads of the server have 2 MiB.
    std::thread::Builder::new().stack_size(1 << 20).spawn(run).unwrap().join().unwrap();
    // Long chains of one precedence are not deep.
    let sum = format!("{{{{ 0{} }}}}", " + 1".repeat(5000));
    assert_eq!(text(&render_with(&sum, &json!({}), None).unwrap()), "5000");
}

#[test]
fn appending_takes_linear_time() {
    // 100,000 appends to a string of up to 10 MB: 500 GB of copies if each copied the string.
    let append = "{% set ns = namespace(x='') %}{% for i in range(100000) %}\
         {% set ns.x = ns.x + 'y' * 98 ~ i % 10 + '\n' %}\
        {% endfor %}{{ ns.x | length }}";
    assert_eq!(text(&render_with(append, &json!({}), None).unwrap()), "10000000");
    let split =
        "{% set x = 'ab</think>' * 100000 %}{% for i in range(1000) %}{% set y = x[i:] %}{% endfor %}{{ x[-3:] }}";
    assert_eq!(text(&render_with(split, &json!({}), None).unwrap()), "nk>");
}

/// A rendering asks for memory in steps, and ends when it is refused.
#[test]
fn memory_of_a_rendering_is_granted_in_steps() {
    let source =
        "{% set ns = namespace(x='') %}{% for i in range(40) %}{% set ns.x = ns.x ~ 'a' * 20000 %}{% endfor %}";
    let asked = Arc::new(Mutex::new(Vec::new()));
    let grant = |most: usize| {
        let asked = asked.clone();
        MemoryGrant(Arc::new(move |bytes| {
            asked.lock().unwrap().push(bytes);
            bytes <= most
        }))
    };
    let within = |grant: &MemoryGrant| {
        let limits = RenderLimits { grant: Some(grant), ..RenderLimits::for_size(0) };
        render_with(source, &json!({}), Some(limits))
    };
    within(&grant(usize::MAX)).unwrap();
    let asked_for = std::mem::take(&mut *asked.lock().unwrap());
    assert!(asked_for.len() >= 2 && asked_for.is_sorted(), "{asked_for:?}");
    assert!(*asked_for.last().unwrap() >= 800_000, "{asked_for:?}");
    let refused = within(&grant(300_000)).unwrap_err();
    assert!(matches!(refused, Error::OutOfMemory { .. }), "{refused}");
    // A short conversation needs no grant.
    asked.lock().unwrap().clear();
    let limits = RenderLimits { grant: Some(&grant(0)), ..RenderLimits::for_size(0) };
    render_with("{{ 'short' }}", &json!({}), Some(limits)).unwrap();
    assert!(asked.lock().unwrap().is_empty());
}

#[test]
fn rendering_can_be_cancelled_and_limited() {
    let cancel = AtomicBool::new(true);
    let source = "{% for a in range(9999) %}{{ a }}{% endfor %}";
    let limits = RenderLimits { cancel: Some(&cancel), ..RenderLimits::for_size(0) };
    assert!(matches!(render_with(source, &json!({}), Some(limits)), Err(Error::Cancelled)));
    cancel.store(false, Ordering::Relaxed);
    assert!(render_with(source, &json!({}), Some(limits)).is_ok());
    let few = RenderLimits { max_work: 5000, ..limits };
    assert!(matches!(render_with(source, &json!({}), Some(few)), Err(Error::TemplateTooSlow { limit: 5000 })));
    let small = RenderLimits { max_bytes: 5000, ..limits };
    assert!(matches!(render_with(source, &json!({}), Some(small)), Err(Error::TemplateTooLarge { limit: 5000 })));
}

#[test]
fn errors_name_line_and_column() {
    let error = |source: &str| render_with(source, &json!({}), None).unwrap_err().to_string();
    assert_eq!(error("\n\n{{ x.y }}"), "chat template failed: 'x' is undefined (line 3, column 4)");
    // Columns count characters, also after text that is removed around a tag.
    assert_eq!(error("\nété {{- 1 }}{{ x.y }}"), "chat template failed: 'x' is undefined (line 2, column 16)");
    assert_eq!(
        error("\n{% if %}"),
        "chat template does not compile: unexpected '%}', expected an expression (line 2, column 7)"
    );
    assert_eq!(
        error("{% for x in y %}\n"),
        "chat template does not compile: unexpected the end of the template, expected 'endfor' or 'else' \
         (line 1, column 15)"
    );
    assert_eq!(error("a\nb {# c"), "chat template does not compile: missing end of comment tag (line 2, column 3)");
    assert_eq!(
        error("{{ [].append(1) }}"),
        "chat template failed: access to attribute 'append' of 'list' object is unsafe (line 1, column 4)"
    );
    assert!(error("{{ 1 | nothing }}").contains("no filter named 'nothing'"));
}

/// Parts of expressions over text of the request (`т`) and of the template.
const STEPS: &[&str] = &[
    ".upper()",
    ".lower()",
    ".strip()",
    ".strip('ж')",
    ".split()",
    ".split('X')[0]",
    ".split('ж')[-1]",
    ".replace('ж', 'Q')",
    ".replace('', 'Q')",
    ".title()",
    " | title",
    " | upper",
    " | trim",
    " | indent(2, true)",
    " | tojson",
    " | string",
    " | list",
    " | join('Q')",
    " | reverse",
    " | first",
    " | last",
    "[1:]",
    "[::-1]",
    "[:-1]",
    "[0]",
    " ~ 'Q'",
    " + 'Q'",
    ".splitlines()",
    ".partition('ж')",
    ".center(9)",
    " | safe",
    " | escape",
    " | replace('ж', 'Q')",
    " | sort",
    " | unique",
    " | map('upper') | list",
    " | batch(2, 'Q') | list",
    " | tojson(ensure_ascii=true)",
    " | pprint",
    " | truncate(5, true)",
    ".rsplit('ж', 1)",
    ".removeprefix('д')",
    ".swapcase()",
    " * 2",
    ".format('Q')",
    " | wordcount",
    " | length",
    " | dictsort",
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    /// Characters of the request stay untrusted through any chain of filters and methods, and so do their escapes.
    #[test]
    fn chains_keep_origins(
        start in prop::sample::select(vec![
            "т", "('Q' ~ т ~ 'Q')", "[т, 'Q', т]", "{т: 'Q'}", "messages", "messages[0].content",
        ]),
        steps in prop::collection::vec(prop::sample::select(STEPS.to_vec()), 0..6),
    ) {
        let mut expression = start.to_owned();
        for step in steps {
            expression = format!("({expression}{step})");
        }
        let extra = json!({ "т": "дж \n<ю>ж-ж" });
        if let Ok(segments) = render_with(&format!("{{{{ {expression} }}}}"), &extra, None) {
            for pair in segments.windows(2) {
                prop_assert_ne!(pair[0].trusted, pair[1].trusted);
            }
            for segment in segments {
                let foreign = segment.text.contains(|c: char| ('\u{400}'..'\u{500}').contains(&c));
                let is_taken = foreign || segment.text.contains("u04");
                prop_assert!(!segment.trusted || !is_taken, "{}: {:?}", expression, segment);
                // The template writes no capital letter but Q.
                let is_own = segment.text.contains('Q') && !expression.contains("swapcase");
                prop_assert!(segment.trusted || !is_own, "{}: {:?}", expression, segment);
            }
        }
    }

    /// No source and no text makes the evaluator panic or pass its limits.
    #[test]
    fn arbitrary_sources_end(
        parts in prop::collection::vec(prop::sample::select(vec![
            "{{", "}}", "{%", "%}", "{#", "#}", "-", "+", "if ", "for ", "x ", "in ", "endif", "endfor", "else ",
            "set ", "=",
            "'", "\"", "\\", "(", ")", "[", "]", "{", "}", ":", ",", ".", "|", "~", "*", "**", "/", "%", "<", "macro ",
            "endmacro", "call ", "endcall", "raw", "endraw", "1", "0x", "1e9", "тест", "\n", " ", "is ", "not ", "and ",
            "loop",
            "namespace", "range(9)", "messages", "тext", "filter ", "upper", "break", "\r", "\u{0}", "😀", "recursive ",
        ]), 0..30),
        wrap in any::<bool>(),
    ) {
        let mut source = parts.concat();
        if wrap {
            source = format!("{{{{ {source} }}}}");
        }
        let limits = RenderLimits { max_work: 100_000, max_bytes: 1 << 20, ..RenderLimits::for_size(0) };
        let _ = render_with(&source, &Value::Object(Map::new()), Some(limits));
    }
}

/// Values are those of jinja2.
#[test]
fn filters_and_functions_of_jinja() {
    let cases = [
        ("{{ 'gamma--delta co-op superlong e.g. x' | wordwrap(6) }}", "gamma\n--\ndelta\nco-op \nsuperl\nong\ne.g. x"),
        ("{{ 'a be-ta\n\n  c' | wordwrap(4, wrapstring='|') }}", "a|be-|ta||  c"),
        ("{{ 'superlong x' | wordwrap(4, break_long_words=false) }}", "superlong\nx"),
        ("{{ 'a b/c?é=1&~' | urlencode }}", "a%20b/c%3F%C3%A9%3D1%26~"),
        ("{{ {'a b': 'c/d', 'n': 1} | urlencode }}", "a+b=c%2Fd&n=1"),
        ("{{ [('x', 'y z')] | urlencode }}", "x=y+z"),
        ("{{ '<p>a <!-- <b> -->\n <i>b</i> &lt;c&gt; &#39;&#x41; 1 < 2' | striptags }}", "a b <c> 'A 1 < 2"),
        ("{{ 'a<!<!-- x -->-- y -->b' | striptags }}", "a-- y -->b"),
        ("<a{{ {'id': 'x<\"y', 'no': none, 'n': 3} | xmlattr }}>", "<a id=\"x&lt;&#34;y\" n=\"3\">"),
        ("{{ {'id': 1} | xmlattr(false) }}", "id=\"1\""),
        ("{% set j = joiner('; ') %}{% for x in 'abc' %}{{ j() }}{{ x }}{% endfor %}", "a; b; c"),
        ("{% set c = cycler('x', 'y') %}{{ c.next() }}{{ c.next() }}{{ c.current }}{{ c.next() }}", "xyxx"),
        ("{% set c = cycler('x', 'y') %}{{ c.next() }}{% set _ = c.reset() %}{{ c.current }}", "xx"),
        ("{% for x in 'aabba' %}{{ '*' if loop.changed(x) }}{{ x }}{% endfor %}", "*aa*bb*a"),
        // A loop may be among its own values.
        ("{% for x in 'ab' %}{{ loop.changed(loop, x) }}{% endfor %}", "TrueTrue"),
    ];
    for (source, expected) in cases {
        assert_eq!(text(&render_with(source, &json!({}), None).unwrap()), expected, "{source}");
    }
}
