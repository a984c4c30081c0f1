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
