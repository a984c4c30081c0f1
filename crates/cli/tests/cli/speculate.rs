//! `--speculate`: replies do not change, and wrong flags are refused by name.

use crate::support::Home;
use serde_json::Value;

const RUN: [&str; 8] = [
    "run",
    "--model",
    "tiny",
    "Once upon a time, there was a big dog. Once upon a time",
    "--raw",
    "-n",
    "60",
    "--seed",
];

#[test]
fn replies_are_the_same_with_every_drafter() {
    let home = Home::new();
    for seed in ["0", "5"] {
        let run = |more: &[&str]| home.run(&[&RUN, &[seed][..], more].concat());
        let plain = run(&[]);
        for drafters in ["off", "ngram", "suffix", "draft=tiny", "draft=tiny,ngram,suffix"] {
            let ran = run(&["--speculate", drafters]);
            assert_eq!(ran.ok(), plain.ok(), "{drafters}");
            let line = ran.stderr.trim().lines().last().unwrap().to_owned();
            let says = line.contains("drafted tokens accepted (") || line.contains("nothing drafted");
            assert_eq!(says, drafters != "off", "{drafters}: {line}");
        }
    }
    let json = |more: &[&str]| -> Value {
        serde_json::from_str(home.run(&[&RUN, &["1", "--json"][..], more].concat()).ok()).unwrap()
    };
    let (plain, drafted) = (json(&[]), json(&["--speculate", "draft=tiny", "--draft-tokens", "4"]));
    for name in ["text", "tokens", "finish_reason", "settings", "seed"] {
        assert_eq!(plain[name], drafted[name], "{name}");
    }
    assert_eq!(plain["speculation"]["drafted"], 0);
    let counts = &drafted["speculation"];
    let of = |name: &str| counts[name].as_u64().unwrap();
    assert_eq!(of("drafted"), of("accepted") + of("rejected"));
    let by_drafter = counts["drafters"].as_object().unwrap();
    assert_eq!(by_drafter.values().map(|counts| counts["drafted"].as_u64().unwrap()).sum::<u64>(), of("drafted"));
}

#[test]
fn explain_shows_proposals_and_explains_the_same_tokens() {
    let home = Home::new();
    let explain = |more: &[&str]| {
        home.run(&[&["explain", "-m", "tiny", "Once upon a time", "--raw", "-n", "30"], more].concat()).ok().to_owned()
    };
    let without_drafts = |page: &str| -> Vec<String> {
        let tables = page.split_once("━━━ token 1 ").unwrap().1;
        tables.lines().filter(|line| !line.starts_with("   draft ")).map(str::to_owned).collect()
    };
    let (plain, drafted) = (explain(&[]), explain(&["--speculate", "draft=tiny"]));
    assert_eq!(without_drafts(&plain), without_drafts(&drafted));
    assert!(drafted.contains("\"draft\" names the drafter") && !plain.contains("drafter"));
    for line in explain(&["--speculate", "draft=tiny", "--json"]).lines() {
        let token: Value = serde_json::from_str(line).unwrap();
        if token["type"] == "token" && !token["proposal"].is_null() {
            assert_eq!(token["proposal"]["drafter"], "draft");
            assert_eq!(token["proposal"]["accepted"], token["proposal"]["id"] == token["id"], "{token}");
        }
    }
}

#[test]
fn wrong_flags_are_refused_by_name() {
    let home = Home::new();
    let other = crate::support::tiny_model::tiny_model(&home, None);
    let other = format!("draft={other}");
    let cases: [(&[&str], &str); 9] = [
        (
            &["--speculate", "ngrm"],
            "expected draft=MODEL, mtp, ngram or suffix, separated by commas, or off; found \"ngrm\"",
        ),
        (&["--speculate", ""], "expected draft=MODEL"),
        (&["--speculate", "ngram,"], "expected draft=MODEL"),
        (&["--speculate", "off,ngram"], "off and ngram cannot be combined"),
        (&["--speculate", "draft="], "draft= needs a model"),
        (&["--speculate", "draft=no-such-model"], "--speculate draft=no-such-model: there is no model"),
        (&["--speculate", "ngram", "--draft-tokens", "16"], "expected 1 to 15"),
        (&["--draft-tokens", "4"], "--draft-tokens has no effect without a drafter"),
        (&["--speculate", &other], "have different vocabularies: token 3 is \"[turn]\""),
    ];
    for (flags, expected) in cases {
        let ran = home.run(&[&["run", "-m", "tiny", "Hello", "-n", "2"], flags].concat());
        assert!(ran.usage().contains(expected), "{flags:?}: {}", ran.stderr);
    }
    let bench = home.run(&["bench", "tiny", "--speculate", "ngram"]);
    assert!(bench.usage().contains("needs --concurrency, --rate or --questions"), "{}", bench.stderr);
    let beams = home.run(&["run", "-m", "tiny", "Hello", "-n", "2", "--beams", "2", "--speculate", "ngram"]);
    assert!(beams.stderr.contains("beam search runs without speculation"), "{}", beams.stderr);
}
