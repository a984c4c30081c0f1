//! `run` and `explain` with a grammar, through the built program and the model that it contains.

use crate::support::Home;
use serde_json::Value;

const SCHEMA: &str = r#"{"type":"object","properties":{"a":{"type":"integer","maximum":99,"minimum":0}},
    "required":["a"],"additionalProperties":false}"#;

fn arguments<'a>(command: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    [&[command, "--model", "tiny", "Once"], more].concat()
}

#[test]
fn replies_satisfy_the_grammar_of_a_flag() {
    let home = Home::new();
    let (schema, grammar) = (home.path().join("schema.json"), home.path().join("list.gbnf"));
    std::fs::write(&schema, SCHEMA).unwrap();
    std::fs::write(&grammar, "root ::= [ab] (\",\" [ab]){3}\n").unwrap();
    let reply = |flag: &str, value: &str| {
        let ran = home.run(&arguments("run", &["--json", "--temperature", "1.5", flag, value]));
        let report: Value = serde_json::from_str(ran.ok()).unwrap();
        report["text"].as_str().unwrap().to_owned()
    };
    let value: Value = serde_json::from_str(&reply("--json-schema", schema.to_str().unwrap())).unwrap();
    assert!(value["a"].as_u64().is_some_and(|a| a <= 99), "{value}");
    let list = reply("--grammar", grammar.to_str().unwrap());
    assert!(list.len() == 7 && list.chars().all(|c| "ab,".contains(c)), "{list}");
    assert_eq!(reply("--regex", "x{4}y"), "xxxxy");
}

#[test]
fn bad_grammars_are_errors_of_usage() {
    let home = Home::new();
    let path = home.path().join("schema.json");
    let path = path.to_str().unwrap();
    let problem = |more: &[&str]| {
        let ran = home.run(&arguments("run", more));
        assert_eq!(ran.status, Some(2), "{}", ran.stderr);
        ran.stderr
    };
    assert!(problem(&["--json-schema", path]).contains("there is no file"));
    std::fs::write(path, "{").unwrap();
    assert!(problem(&["--json-schema", path]).contains("this is not JSON"));
    std::fs::write(path, r#"{"items":{"uniqueItems":true}}"#).unwrap();
    assert!(problem(&["--json-schema", path]).contains("--json-schema: the schema at #/items/uniqueItems: "));
    assert!(problem(&["--regex", "("]).contains("unclosed group"));
    assert!(problem(&["--regex", "a", "--grammar", path]).contains("cannot be used with"));
    assert!(problem(&["--regex", "a", "--beams", "2"]).contains("--beams cannot be combined with --regex"));
}

#[test]
fn a_cut_reply_says_that_it_is_not_complete() {
    let home = Home::new();
    let ran = home.run(&arguments("run", &["--regex", "[a-z]{40}", "--max-tokens", "3"]));
    assert!(ran.stderr.contains("[the reply ended before its grammar did"), "{}", ran.stderr);
    let ran = home.run(&arguments("run", &["--regex", "[a-z]{4}"]));
    assert!(!ran.stderr.contains("before its grammar"), "{}", ran.stderr);
    let state = |more: &[&str]| {
        let ran = home.run(&arguments("run", &[&["--json"], more].concat()));
        let report: Value = serde_json::from_str(ran.ok()).unwrap();
        report["replies"].as_array().map_or(report["grammar"].clone(), |replies| replies[1]["grammar"].clone())
    };
    assert_eq!(state(&["--regex", "[a-z]{40}", "--max-tokens", "3"]), "unfinished");
    assert_eq!(state(&["--regex", "[a-z]{40}", "--max-tokens", "3", "--choices", "2"]), "unfinished");
    assert_eq!(state(&["--regex", "[a-z]{4}"]), Value::Null);
    assert_eq!(state(&["--max-tokens", "3"]), Value::Null);
}

#[test]
fn explain_shows_what_the_grammar_expected() {
    let home = Home::new();
    let ran = home.run(&arguments("explain", &["--regex", "[a-c]{2}", "--max-tokens", "2"]));
    assert!(ran.ok().contains("expected 'a' to 'c'"), "{}", ran.ok());
    assert!(ran.ok().contains("tokens were cut"), "{}", ran.ok());
    assert!(ran.ok().contains("The grammar is complete, so the reply ends."), "{}", ran.ok());
}
