//! Tests of the pattern guard; the `fancy-regex` crate, with another engine, says what matches.

use fancy_regex::Regex;
use proptest::prelude::*;

use super::super::{Passage, Scan};
use super::*;

fn guard(lines: &str) -> PatternGuard {
    PatternGuard::parse(lines).unwrap()
}

/// Returns the text that is shown of an answer that arrives in `pieces`, and whether it is blocked.
fn shown(guard: &PatternGuard, pieces: &[&str]) -> (String, bool) {
    let mut scanner = guard.scanner().unwrap();
    let mut num_shown = 0;
    for (number, piece) in pieces.iter().enumerate() {
        match scanner.push(number, Passage::Answer, piece) {
            Scan::Passed(end) => num_shown = num_shown.max(end),
            Scan::Blocked { from, .. } => return (pieces[..from].concat(), true),
        }
    }
    match scanner.finish() {
        Scan::Passed(end) => {
            assert_eq!(end, pieces.len(), "a reply that passes is shown to its end");
            (pieces.concat(), false)
        }
        Scan::Blocked { from, .. } => {
            assert!(from >= num_shown, "a piece of the match was shown before");
            (pieces[..from].concat(), true)
        }
    }
}

#[test]
fn a_phrase_over_several_pieces_is_blocked() {
    let guard = guard("# comment\n\nproject\\s{1,3}orion\n\\bhunter2\\b");
    assert_eq!(guard.num_patterns(), 2);
    assert_eq!(shown(&guard, &["See ", "Pro", "ject ", " Ori", "on."]), ("See ".into(), true));
    assert_eq!(shown(&guard, &["See ", "project ", "oriole"]), ("See project oriole".into(), false));
    assert_eq!(shown(&guard, &["it is ", "hunter2"]), ("it is ".into(), true), "the end is a word boundary");
    assert_eq!(shown(&guard, &["it is ", "hunter2", "0"]), ("it is hunter20".into(), false));
    assert_eq!(shown(&guard, &["ｐｒｏ", "ject\u{200b} 𝐎ri", "\u{200b}", "on"]), ("".into(), true));
    assert_eq!(guard.find("a hunter2"), Some("line 4".into()));
}

#[test]
fn text_is_held_only_while_a_match_may_be_completed() {
    let guard = guard("abcd");
    let mut scanner = guard.scanner().unwrap();
    let passed = [("xa", 0), ("b", 0), ("x", 3), ("ab", 3), ("ab", 4), ("z", 6)];
    for (number, (text, end)) in passed.into_iter().enumerate() {
        assert_eq!(scanner.push(number, Passage::Answer, text), Scan::Passed(end), "{text}");
    }
}

#[test]
fn passages_are_searched_apart_and_wait_for_each_other() {
    let guard = guard("abc");
    let mut scanner = guard.scanner().unwrap();
    assert_eq!(scanner.push(0, Passage::Thoughts, "a"), Scan::Passed(0));
    assert_eq!(scanner.push(1, Passage::Answer, "b"), Scan::Passed(0), "later pieces wait");
    assert_eq!(scanner.push(2, Passage::Thoughts, "bx"), Scan::Passed(3));
    assert_eq!(scanner.push(3, Passage::Call(0), "ab"), Scan::Passed(3));
    assert_eq!(scanner.push(4, Passage::Call(1), "c"), Scan::Passed(5), "calls are not joined");
    assert_eq!(scanner.push(5, Passage::Answer, "xab"), Scan::Passed(5));
    assert_eq!(scanner.push(6, Passage::Call(1), "x"), Scan::Passed(5));
    assert!(matches!(scanner.push(7, Passage::Answer, "cd"), Scan::Blocked { from: 5, .. }));
}

#[test]
fn escapes_in_arguments_hide_nothing() {
    let guard = guard("foo\\s{0,2}bar\n\u{1f600}x");
    let scan = |pieces: &[&str]| {
        let mut scanner = guard.scanner().unwrap();
        let scans: Vec<Scan> =
            pieces.iter().enumerate().map(|(i, piece)| scanner.push(i, Passage::Call(0), piece)).collect();
        (scans.last().cloned().unwrap(), scanner.finish())
    };
    let from = |from: usize| Scan::Blocked { from, rule: "line 1".into() };
    assert_eq!(scan(&["f {\"a\": \"", "f\\u006f", "o\\n", "bar\"}"]).1, from(1));
    assert_eq!(scan(&["f {\"a\": \"", "f\\u", "006", "fo\\nbar\"}"]).1, from(1), "an escape over pieces");
    assert_eq!(scan(&["{\"a\": \"\\u00", "66oobar\"}"]).1, from(0), "a match begins where its escape does");
    assert!(matches!(scan(&["{\"a\": \"\\ud83d", "\\ude00", "x\"}"]).1, Scan::Blocked { from: 0, .. }));
    assert_eq!(scan(&["{\"a\": \"", "\\"]).0, Scan::Passed(1), "an escape is held until it is complete");
    assert_eq!(scan(&["{\"a\": \"", "\\u0066oo", "baz\"}"]), (Scan::Passed(3), Scan::Passed(3)));
    assert_eq!(scan(&["{\"a\": \"", "\\\\u0066oobar\"}"]).1, Scan::Passed(2), "an escaped backslash");
    // Only arguments of calls are JSON.
    let mut scanner = guard.scanner().unwrap();
    scanner.push(0, Passage::Answer, "\\u0066oobar");
    assert_eq!(scanner.finish(), Scan::Passed(1));
}

#[test]
fn expressions_that_cannot_be_used_are_refused_by_line() {
    for (line, part) in [
        ("a.*b", "any length"),
        ("a+", "any length"),
        ("a{5000}", "at most 4096"),
        ("a{4096}", ""),
        ("x?", "empty text"),
        ("(", "not valid"),
        ("(?=a)", "not valid"),
        ("ﬁre", "written as \"fi\""),
        ("a\u{200b}b", "left out"),
        ("[a&&b]", "never match"),
    ] {
        let found = PatternGuard::parse(&format!("ok\n{line}"));
        match found {
            Ok(_) => assert_eq!(part, "", "{line}"),
            Err(error) => assert!(!part.is_empty() && error.to_string().contains(part), "{line}: {error}"),
        }
    }
    assert!(matches!(PatternGuard::parse("# nothing\n"), Err(PatternError::Empty)));
    let huge = "((a{16}){16}){16}\n".repeat(2000);
    assert!(matches!(PatternGuard::parse(&huge), Err(PatternError::All { .. })));
}

proptest! {
    /// Arguments are blocked if and only if a parser of JSON finds a match in the value, however they are spelled and
    /// cut.
    #[test]
    fn spelling_does_not_matter(
        value in "[fob😀\n\"\\\\]{0,12}",
        is_escaped in prop::collection::vec(any::<bool>(), 24),
        cuts in prop::collection::vec(1usize..4, 0..40),
    ) {
        let guard = guard("fo{1,2}b\n😀f");
        let mut text = "\"".to_owned();
        for (character, is_escaped) in value.chars().zip(is_escaped) {
            if is_escaped {
                let units = character.encode_utf16(&mut [0; 2]).to_vec();
                units.into_iter().for_each(|unit| text += &format!("\\u{unit:04x}"));
            } else {
                let quoted = serde_json::to_string(&character).unwrap();
                text += &quoted[1..quoted.len() - 1];
            }
        }
        text.push('"');
        prop_assert_eq!(&serde_json::from_str::<String>(&text).unwrap(), &value);
        let mut scanner = guard.scanner().unwrap();
        let (mut rest, mut number) = (text.as_str(), 0);
        for cut in cuts.into_iter().chain(std::iter::repeat(2)) {
            if rest.is_empty() {
                break;
            }
            let at = rest.char_indices().nth(cut).map_or(rest.len(), |(at, _)| at);
            scanner.push(number, Passage::Call(0), &rest[..at]);
            (rest, number) = (&rest[at..], number + 1);
        }
        let oracle = Regex::new("fo{1,2}b|😀f").unwrap();
        let is_found = oracle.is_match(&value).unwrap() || oracle.is_match(&text).unwrap();
        prop_assert_eq!(matches!(scanner.finish(), Scan::Blocked { .. }), is_found, "{}", text);
    }

    /// For any cut into pieces, a reply is blocked if another engine finds a match, and what is shown has none.
    #[test]
    fn pieces_do_not_matter(
        text in "[abAß é\n]{0,40}",
        patterns in prop::collection::vec(
            prop::sample::select(vec![
                "ab", "a.b", "a{2,3}b?", "\\ba", "b\\b", "^a", "ab$", "(?-i)A", "é|ßa", "(ab|ba){2}", "[^a]b\\Ba", "(?m)^b",
            ]),
            1..4,
        ),
        cuts in prop::collection::vec(0usize..5, 0..40),
    ) {
        let guard = guard(&patterns.join("\n"));
        let mut pieces = Vec::new();
        let mut rest = text.as_str();
        for cut in cuts.into_iter().chain(std::iter::repeat(1)) {
            if rest.is_empty() {
                break;
            }
            let at = rest.char_indices().nth(cut).map_or(rest.len(), |(at, _)| at);
            let (piece, later) = rest.split_at(at);
            pieces.push(piece);
            rest = later;
        }
        let oracle: Vec<Regex> = patterns.iter().map(|pattern| Regex::new(&format!("(?i){pattern}")).unwrap()).collect();
        let first = oracle.iter().filter_map(|regex| regex.find(&text).unwrap()).map(|found| found.start()).min();
        let (shown, is_blocked) = shown(&guard, &pieces);
        prop_assert_eq!(is_blocked, first.is_some());
        if let Some(first) = first {
            // The match that is complete first may begin after the leftmost one, but nothing behind its end is shown.
            let end = oracle.iter().filter_map(|regex| regex.find(&text).unwrap()).map(|found| found.end()).min();
            prop_assert!(shown.len() < end.unwrap().max(first + 1));
        } else {
            prop_assert_eq!(shown, text);
        }
    }
}
