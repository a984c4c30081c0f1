//! Compares [`Pattern`] with a backtracking engine, and attacks it with long texts.

use std::ops::Range;

use fancy_regex::RegexBuilder;
use proptest::prelude::*;

use super::Pattern;
use super::parser::{Refused, parse};

fn found(pattern: &Pattern, text: &str) -> Vec<Range<usize>> {
    let mut all = Vec::new();
    pattern.for_each_match(text, &mut |range| all.push(range));
    all
}

fn compile(pattern: &str) -> Pattern {
    Pattern::new("pattern", pattern).unwrap()
}

/// Patterns of public tokenizers that have no hand-written scanner, and constructs that could be in one.
const PATTERNS: &[&str] = &[
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+",
    r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+|\p{N}{1,3}|\s+",
    r" ?[^(\s|[.,!?…。，、।۔،])]+",
    r"\d{1,3}(?=(?:\d{3})*\b)",
    r"(?:\r?\n)+(?!\r?\n)|[^\r\n]+",
    r"(?<!\n)[^\n]+|\n",
    r"(?<=[a-z])(?=[A-Z])|(?<=\d)\D",
    r"^\s+|\s+$|\b\w+?\b",
    r"(?m)^.*?$",
    r"(?s).{2,5}?x|.",
    r"(a*)*|b",
    r"(?:a|ab)(?:c|bcd)(?:d*)",
    r"(?=(a|b)*x)(?!a{3})[ab]+",
    r"(?!(?!a)b)\w",
    r"a{0}b{2,}?|[^a]{,2}",
    r"(?>\d{2})+|(?>a+)b",
    r"|a",
    r"\A\d(?=(?:\d{3})+\z)",
];

#[test]
fn matches_are_those_of_a_backtracking_engine() {
    let texts = [
        "",
        "a",
        "aaaa",
        "ab",
        "abcd",
        "abcbcd",
        "aabbx ab",
        "1234567",
        "12 345 6789x",
        "Hello World'S 'll!!\r\n\r\n  x  ",
        "  \n \n",
        "中文 abc漢字DEF",
        "camelCaseText12ab",
        "line\nline two\n\nend",
        "a.b,c!？。",
        "\u{301}é²½ ǅa\t\tb ",
    ];
    for pattern in PATTERNS {
        let (ours, oracle) = (compile(pattern), RegexBuilder::new(pattern).build().unwrap());
        for text in texts {
            let expected: Vec<_> = oracle.find_iter(text).map(|found| found.unwrap().range()).collect();
            assert_eq!(found(&ours, text), expected, "{pattern} on {text:?}");
        }
    }
}

/// Patterns over a small alphabet, built from every construct that is supported.
fn any_pattern() -> impl Strategy<Value = String> {
    let leaf = prop_oneof![
        4 => "[abc]",
        1 => Just(".".to_owned()),
        1 => Just("[^a]".to_owned()),
        1 => Just("[ab]++".to_owned()),
        1 => Just("a?+".to_owned()),
        1 => Just("b{1,2}+".to_owned()),
        1 => Just(r"\b".to_owned()),
        1 => Just("^".to_owned()),
        1 => Just("$".to_owned()),
        1 => Just("(?<=a)".to_owned()),
        1 => Just("(?<![bc])".to_owned()),
        1 => Just("(?i:A)".to_owned()),
    ];
    leaf.prop_recursive(4, 24, 4, |inner| {
        // A repeated empty match has no common meaning among engines, so only what reads a character is repeated.
        let quantifier =
            prop_oneof![Just("*"), Just("+"), Just("?"), Just("*?"), Just("+?"), Just("{1,3}"), Just("{2}")];
        prop_oneof![
            4 => prop::collection::vec(inner.clone(), 1..4).prop_map(|parts| parts.concat()),
            3 => prop::collection::vec(inner.clone(), 1..4).prop_map(|parts| format!("(?:{})", parts.join("|"))),
            3 => (inner.clone(), quantifier).prop_map(|(part, quantifier)| format!("(?:[abc]{part}){quantifier}")),
            1 => inner.clone().prop_map(|part| format!("(?={part})")),
            1 => inner.prop_map(|part| format!("(?!{part})")),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn random_patterns_match_like_a_backtracking_engine(pattern in any_pattern(), text in "[abcA ]{0,12}") {
        let oracle = RegexBuilder::new(&pattern).build().unwrap();
        let expected: Result<Vec<_>, _> = oracle.find_iter(&text).map(|found| found.map(|f| f.range())).collect();
        // The oracle gives up after a million steps.
        if let Ok(expected) = expected {
            prop_assert_eq!(found(&compile(&pattern), &text), expected, "{} on {:?}", pattern, text);
        }
    }
}

/// A match, a look-ahead and a look-behind that cross blocks, and a cache that is emptied between them.
#[test]
fn matches_cross_blocks() {
    for len in [511, 512, 513, 1024, 5000] {
        let text = "é".repeat(len) + " " + &"b".repeat(len);
        assert_eq!(found(&compile("é+|b+"), &text), [0..2 * len, 2 * len + 1..text.len()]);
        assert_eq!(found(&compile("é(?=é* b+$)"), &text).len(), len);
        assert_eq!(found(&compile("(?<=é)é|(?<=b)b"), &text).len(), 2 * len - 2);
        assert_eq!(found(&compile("(?!é* b+c)é+?(?!é)"), &text).len(), 1);
    }
    // Each position of this text has another set of states.
    let text: String =
        (0..60_000u32).map(|i| if (i.wrapping_mul(2_654_435_761) >> 16) & 1 == 0 { 'a' } else { 'b' }).collect();
    let pattern = compile("[ab](?=[ab]{50}a)");
    let expected: Vec<_> = text[51..].char_indices().filter(|(_, c)| *c == 'a').map(|(at, _)| at..at + 1).collect();
    assert_eq!(found(&pattern, &text), expected);
}

/// The patterns of an attack that took hours, and others that make a search from each position quadratic. Each is
/// refused or finishes: with a quadratic engine, a text of 300 kB would take minutes.
#[test]
fn slow_patterns_are_refused_or_linear() {
    let accepted = [
        r"(?!(z+)+y)z",
        r"(?>a+)+b",
        r"(a|a)*(?!x)b",
        r"(?:(?:a|a)*)*(?!x)b",
        r"(?:(?:q|q)*)*(?!x)b",
        r"(\s|\s)*(?!x)y",
        r"a*b|a",
        r".*[^A-Z]|[A-Z]",
        r"(?=.*y).",
        r"(?!.*y).",
        r"\s+$",
        r"\s*\n|\s",
        r"(a+)+$",
        r"(x+x+)+y",
        r"(?=(a+)b)a",
        r"\d{1,510}(?=(?>\d{510})*(?!\d))",
        r"(?:a?){100}a{100}",
        r"(?=a*?b|a*?c|a*?d)a",
    ];
    let shapes = ["a", "z", "q", " ", "A", "x", "0", "ab", "aab", "\n", "\u{301}"];
    for pattern in accepted {
        let pattern = compile(pattern);
        for shape in shapes {
            let text = shape.repeat(300_000 / shape.len());
            for text in [&text, &(text.clone() + "y")] {
                let mut end = 0;
                pattern.for_each_match(text, &mut |range| {
                    assert!(end <= range.start && range.start <= range.end);
                    end = range.end;
                });
            }
        }
    }
    for (pattern, what) in [
        (r"(?=(a+))\1b", "a back reference at character 9"),
        (r"(?<=a+)b", "a look-behind of more than one character at character 1"),
        (r"é(?>a+b)+c", "an atomic group of more than one repeated character at character 2"),
        (r"(?:[ab]{100}){100}", "more than 2304 states"),
        (r"(?:(?:(?:(?:){10000}){10000}){10000}){10000}", "more than 2304 states"),
        // The automaton would have to remember which of the last 300 characters were an `a`.
        (r"[ab](?=[ab]{300}a)", "more than 64 states and a table of transitions that is too large"),
        (r".*a.{100}b|c", "a table of transitions that is too large"),
        (&"(?=a)".repeat(100), "more than 64 look-arounds"),
    ] {
        let error = Pattern::new("pattern", pattern).unwrap_err().to_string();
        assert!(error.contains(what), "{error}");
    }
}

#[test]
fn refusals_name_the_construct_and_its_position() {
    for (pattern, what, at) in [
        (r"(?=(a+))\1b", "a back reference", 8),
        (r"x(?<=a+)b", "a look-behind of more than one character", 1),
        (r"(?>a+b)+c", "an atomic group of more than one repeated character", 0),
        (r"(ab)++c", "a possessive quantifier of more than one character", 0),
        (r"a(b", "a `(` without its `)`", 1),
        (r"a)b", "a `)` without its `(`", 1),
        (r"[ab", "a `[` without its `]`", 0),
        (r"a|*b", "a quantifier of nothing", 2),
        (r"a\Gb", "the unsupported escape \\G", 1),
        (r"\p{Nonesuch}", "the unsupported class or escape \"\\\\p{Nonesuch}\"", 0),
        (r"(?(1)a|b)", "a group of an unsupported kind (conditional, recursion, flag)", 0),
        (r"a{20000}", "a repetition that is not within 0 and 10000", 1),
        (r"a{3,2}", "a repetition that is not within 0 and 10000", 1),
        (r"(?=a)*", "a repeated look-around or anchor", 0),
    ] {
        assert_eq!(parse(pattern), Err(Refused { what: what.to_owned(), at }), "{pattern}");
    }
    let deep = "(".repeat(60) + &")".repeat(60);
    assert!(parse(&deep).unwrap_err().what.contains("nested deeper"));
}

#[test]
fn possessive_characters_become_look_ahead() {
    for (pattern, plain) in [
        ("a++", "a+(?!a)"),
        ("(?>a+)", "a+(?!a)"),
        ("a?+", "(?:a{1}|a{0,0}(?!a))"),
        ("[ab]{1,3}+", "(?:[ab]{3}|[ab]{1,2}(?![ab]))"),
        ("(?>ab)", "ab"),
        (r"(?<=a|b)", "(?<=[ab])"),
        ("a{,3}", "a{0,3}"),
    ] {
        assert_eq!(parse(pattern), parse(plain), "{pattern}");
    }
}
