//! Replies of every kind of grammar: they satisfy it, end where it ends, and can be rolled back.

mod common;

use common::{COMPILER, Random, TOKENIZER, compile, mask, sample};
use pellucid_grammar::{Error, GrammarCache, GrammarSource, MAX_CACHED};
use pellucid_sampling::{TokenConstraint, TokenMatcher};
use serde_json::{Value, json};

fn text(ids: &[u32]) -> String {
    ids.iter().map(|&id| String::from_utf8_lossy(&TOKENIZER.token(id).unwrap().bytes).into_owned()).collect()
}

/// Moves a matcher past a text.
fn follow(matcher: &mut dyn TokenMatcher, text: &str) {
    for id in TOKENIZER.encode_within(text) {
        matcher.accept(id).unwrap();
    }
}

#[test]
fn replies_satisfy_their_schema() {
    let schema = json!({
        "type": "object",
        "properties": {
            "name": { "type": "string", "minLength": 1, "maxLength": 8 },
            "age": { "type": "integer", "minimum": 0, "maximum": 150 },
            "tags": { "type": "array", "items": { "enum": ["red", "green", 3] }, "maxItems": 3 }
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": false
    });
    let grammar = compile(GrammarSource::JsonSchema(schema)).unwrap();
    let mut num_complete = 0;
    for seed in 0..50 {
        let reply = sample(&grammar, &mut Random(seed), 400);
        if !reply.is_complete {
            continue;
        }
        num_complete += 1;
        let value: Value = serde_json::from_str(&reply.text).unwrap_or_else(|error| panic!("{error}: {}", reply.text));
        let (name, age) = (value["name"].as_str().unwrap(), value["age"].as_u64().unwrap());
        assert!((1..=8).contains(&name.chars().count()) && age <= 150, "{value}");
        let tags = value["tags"].as_array().unwrap();
        assert!(tags.len() <= 3 && tags.iter().all(|tag| [json!("red"), json!("green"), json!(3)].contains(tag)));
        assert_eq!(value.as_object().unwrap().len(), 3);
    }
    assert!(num_complete > 40, "{num_complete} of 50 replies ended");
}

#[test]
fn formats_of_integers_are_bounds() {
    let cases = [
        ("int8", "-128", "127", ["-129", "128"]),
        ("int32", "-2147483648", "2147483647", ["-2147483649", "2147483648"]),
        ("int64", "-9223372036854774784", "9223372036854774784", ["-9223372036854775809", "9223372036854775808"]),
        ("uint8", "0", "255", ["-1", "256"]),
        ("uint64", "0", "18446744073709551615", ["-1", "-9"]),
    ];
    for (format, least, most, outside) in cases {
        let schema = json!({ "type": "array", "items": { "type": "integer", "format": format } });
        let grammar = compile(GrammarSource::JsonSchema(schema)).unwrap();
        let takes = |number: &str| {
            let mut matcher = grammar.matcher();
            TOKENIZER.encode_within(&format!("[{number}]")).into_iter().all(|id| matcher.accept(id).is_ok())
        };
        assert!(takes(least) && takes(most) && takes("7"), "{format}");
        assert!(!outside.into_iter().any(takes), "{format}");
    }
}

#[test]
fn a_json_object_is_any_object_and_nothing_else() {
    let grammar = compile(GrammarSource::JsonObject).unwrap();
    for seed in 0..50 {
        let reply = sample(&grammar, &mut Random(seed), 300);
        if reply.is_complete {
            assert!(serde_json::from_str::<Value>(&reply.text).unwrap().is_object(), "{}", reply.text);
        }
    }
}

#[test]
fn expressions_choices_and_grammars_hold() {
    let is_date = |text: &str| {
        let bytes = text.as_bytes();
        bytes.len() == 7 && bytes.iter().enumerate().all(|(i, b)| if i == 4 { *b == b'-' } else { b.is_ascii_digit() })
    };
    let grammar = compile(GrammarSource::Regex(r"^\d{4}-[0-9]{2}$".into())).unwrap();
    (0..20).for_each(|seed| assert!(is_date(&sample(&grammar, &mut Random(seed), 100).text)));

    let choices = ["yes", "no", "not \"sure\"\n", "né"].map(String::from);
    let grammar = compile(GrammarSource::Choice(choices.to_vec())).unwrap();
    let replies: Vec<String> = (0..40).map(|seed| sample(&grammar, &mut Random(seed), 100).text).collect();
    assert!(replies.iter().all(|reply| choices.contains(reply)), "{replies:?}");
    assert!(choices.iter().all(|choice| replies.contains(choice)), "{replies:?}");

    let lark = "start: item (\",\" item)*\nitem: /[a-c]/ | \"(\" start \")\"\n";
    let gbnf = "root ::= item (\",\" item)*\nitem ::= [a-c] | \"(\" root \")\"\n";
    for source in [lark, gbnf] {
        let grammar = compile(GrammarSource::Grammar(source.into())).unwrap();
        for seed in 0..40 {
            let reply = sample(&grammar, &mut Random(seed), 200);
            let depth = |open: char| reply.text.matches(open).count();
            assert!(!reply.is_complete || depth('(') == depth(')'), "{}", reply.text);
            assert!(reply.text.chars().all(|c| "abc(),".contains(c)), "{}", reply.text);
        }
    }
}

#[test]
fn the_grammars_of_llama_cpp_compile() {
    let json = r##"
        root   ::= object
        value  ::= object | array | string | number | ("true" | "false" | "null") ws
        object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
        array  ::= "[" ws ( value ("," ws value)* )? "]" ws
        string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
        number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
        # Optional space: by convention, applied in this grammar after literal chars when allowed
        ws ::= | " " | "\n" [ \t]{0,20}
    "##;
    let json: String = json.lines().map(|line| format!("{}\n", line.trim_start())).collect();
    let grammar = compile(GrammarSource::Grammar(json)).unwrap();
    let mut num_complete = 0;
    for seed in 0..40 {
        let reply = sample(&grammar, &mut Random(seed), 300);
        if reply.is_complete {
            num_complete += 1;
            assert!(serde_json::from_str::<Value>(&reply.text).unwrap().is_object(), "{}", reply.text);
        }
    }
    assert!(num_complete > 20, "{num_complete} of 40 replies ended");
}

#[test]
fn a_reply_ends_when_nothing_can_follow() {
    let grammar = compile(GrammarSource::JsonSchema(json!({ "const": { "a": [1, 2] } }))).unwrap();
    let mut matcher = grammar.matcher();
    assert!(!matcher.may_end() && !matcher.is_complete());
    follow(&mut *matcher, "{\"a\":[1,2]}");
    assert!(matcher.may_end() && matcher.is_complete());
    let mut ends = TOKENIZER.end_ids().to_vec();
    ends.sort_unstable();
    assert_eq!(mask(&mut *matcher), ends);
    assert_eq!(matcher.expected(), "expected the end");
}

#[test]
fn rollback_restores_every_mask() {
    let schema = json!({ "type": "array", "items": { "type": "integer" } });
    let grammar = compile(GrammarSource::JsonSchema(schema)).unwrap();
    let mut matcher = grammar.matcher();
    let mut random = Random(1);
    let mut masks = vec![mask(&mut *matcher)];
    for _ in 0..30 {
        let tokens: Vec<u32> =
            masks[masks.len() - 1].iter().copied().filter(|id| !TOKENIZER.end_ids().contains(id)).collect();
        if tokens.is_empty() || matcher.is_complete() {
            break;
        }
        matcher.accept(tokens[random.below(tokens.len())]).unwrap();
        masks.push(mask(&mut *matcher));
    }
    assert!(masks.len() > 3);
    matcher.accept(TOKENIZER.end_ids()[0]).unwrap();
    matcher.rollback(2).unwrap();
    masks.pop();
    while let Some(expected) = masks.pop() {
        assert_eq!(mask(&mut *matcher), expected);
        if !masks.is_empty() {
            matcher.rollback(1).unwrap();
        }
    }
    assert!(matcher.rollback(1).is_err(), "nothing is left to take back");
}

#[test]
fn forced_tokens_are_what_the_masks_allow() {
    let schema = json!({
        "type": "object", "properties": { "temperature": { "type": "boolean" } },
        "required": ["temperature"], "additionalProperties": false
    });
    let grammar = compile(GrammarSource::JsonSchema(schema)).unwrap();
    let mut matcher = grammar.matcher();
    matcher.accept(TOKENIZER.encode_within("{")[0]).unwrap();
    matcher.accept(TOKENIZER.encode_within("\"")[0]).unwrap();
    assert!(matcher.expected().starts_with("expected \"temperature\\\""), "{}", matcher.expected());
    let forced = matcher.forced().to_vec();
    for (i, &token) in forced.iter().enumerate() {
        assert_eq!(matcher.forced(), &forced[i..]);
        assert_eq!(mask(&mut *matcher), [token]);
        matcher.accept(token).unwrap();
    }
    matcher.rollback(forced.len() - 1).unwrap();
    assert_eq!(matcher.forced(), &forced[1..]);
    assert!(text(&forced).starts_with("temperatur"), "{:?}", text(&forced));
}

#[test]
fn matchers_of_one_grammar_are_independent() {
    let grammar = compile(GrammarSource::Choice(vec!["ab".into(), "ac".into()])).unwrap();
    let (mut first, mut second) = (grammar.matcher(), grammar.matcher());
    follow(&mut *first, "ab");
    assert!(first.is_complete() && !second.is_complete());
    follow(&mut *second, "ac");
    assert!(second.is_complete());
}

#[test]
fn a_token_that_is_not_allowed_is_an_error_and_no_panic() {
    let grammar = compile(GrammarSource::Choice(vec!["ab".into()])).unwrap();
    let mut matcher = grammar.matcher();
    assert!(matcher.accept(TOKENIZER.encode_within("x")[0]).is_err());
    assert!(matcher.accept(u32::MAX).is_err());
    assert!(matcher.mask(&mut common::words()).is_err());
}

#[test]
fn control_tokens_are_never_allowed() {
    let grammar = compile(GrammarSource::Regex("(?s:.*)".into())).unwrap();
    let allowed = mask(&mut *grammar.matcher());
    let is_structure = |id: &u32| TOKENIZER.is_guarded(*id) && !TOKENIZER.end_ids().contains(id);
    assert!(allowed.len() > 100 && !allowed.iter().any(is_structure));
}

#[test]
fn problems_name_their_place() {
    let problem = |source| compile(source).unwrap_err();
    let schema = json!({ "properties": { "a": { "type": "object", "properties": {
        "b": { "type": "string", "pattern": "(" } } } } });
    match problem(GrammarSource::JsonSchema(schema)) {
        Error::Schema { place, .. } => assert_eq!(place, "#/properties/a/properties/b"),
        other => panic!("{other}"),
    }
    for source in ["(", "a{3,2}", "(?=a)b", "[z-a]", "\\1"] {
        let text = problem(GrammarSource::Regex(source.into())).to_string();
        assert!(text.starts_with("the regex: ") && !text.contains('\n'), "{text}");
    }
    for source in ["", "start: undefined", "start: \"a", "root ::= x"] {
        let text = problem(GrammarSource::Grammar(source.into())).to_string();
        assert!(text.starts_with("the grammar: "), "{text}");
    }
    for (source, place) in [
        ("start: foo", "line 1, column 8: no rule or token is called foo"),
        ("start: a\na: \"x\" )", "line 2, column 8: "),
        ("start: \"a\" |\n ?", "line 2, column 2: "),
    ] {
        let text = problem(GrammarSource::Grammar(source.into())).to_string();
        assert!(text.starts_with(&format!("the grammar: {place}")), "{text}");
    }
    assert!(problem(GrammarSource::Choice(Vec::new())).to_string().starts_with("the choice: "));
    let impossible = json!({ "type": "integer", "minimum": 3, "maximum": 1 });
    assert!(matches!(problem(GrammarSource::JsonSchema(impossible)), Error::Schema { .. }));
}

#[test]
fn tenants_have_bounded_caches_of_their_own() {
    let cache: GrammarCache<u32> = GrammarCache::default();
    let source = |i: usize| GrammarSource::Choice(vec![format!("a{i}")]);
    let first = cache.get(1, source(0), &COMPILER).unwrap();
    assert!(std::sync::Arc::ptr_eq(&first, &cache.get(1, source(0), &COMPILER).unwrap()));
    assert!(!std::sync::Arc::ptr_eq(&first, &cache.get(2, source(0), &COMPILER).unwrap()));
    for i in 1..=MAX_CACHED {
        cache.get(1, source(i), &COMPILER).unwrap();
    }
    assert_eq!((cache.num_cached(&1), cache.num_cached(&2), cache.num_cached(&3)), (MAX_CACHED, 1, 0));
    assert!(!std::sync::Arc::ptr_eq(&first, &cache.get(1, source(0), &COMPILER).unwrap()));
}
