//! `explain` through the built program, on a tiny random model: the JSON agrees with itself and with `run`, the page
//! fits 80 columns.

use crate::support::Home;
use crate::support::tiny_model::{TEMPLATE, tiny_model};
use serde_json::Value;
use unicode_width::UnicodeWidthStr;

/// Chains that between them use every step that needs no grammar.
const CHAINS: [&[&str]; 9] = [
    &[],
    &["--preset", "brainstorm"],
    &["--temperature", "0"],
    &["--temperature", "1"],
    &["--temperature", "2.5"],
    &["--mirostat", "3", "--temperature", "1.2"],
    &["--logit-bias", "a=4", "--ban", "e", "--min-tokens", "4", "--dynamic-temperature", "0.5", "--temperature", "1"],
    &["--samplers", "top_p,min_p,temperature", "--top-p", "0.9", "--min-p", "0.01", "--temperature", "3"],
    &[
        "--repetition-penalty",
        "1.2",
        "--presence-penalty",
        "0.5",
        "--frequency-penalty",
        "0.25",
        "--dry-multiplier",
        "0.8",
        "--temperature",
        "1.5",
        "--top-k",
        "60",
        "--typical-p",
        "0.95",
        "--top-p",
        "0.97",
        "--min-p",
        "0.002",
        "--top-n-sigma",
        "3",
        "--xtc-probability",
        "0.5",
        "--xtc-threshold",
        "0.02",
    ],
];

struct Explained {
    header: Value,
    tokens: Vec<Value>,
    end: Value,
}

fn explain(home: &Home, model: &str, flags: &[&str]) -> Explained {
    let base = ["explain", "Hello there", "--model", model, "--seed", "7", "-n", "12", "--json"];
    let ran = home.run(&[&base, flags].concat());
    let mut lines: Vec<Value> = ran.ok().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(lines.len() >= 2, "{ran:?}");
    let (header, end) = (lines.remove(0), lines.pop().unwrap());
    assert_eq!((header["type"].as_str(), end["type"].as_str()), (Some("header"), Some("end")));
    Explained { header, tokens: lines, end }
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

#[test]
fn the_record_agrees_with_itself() {
    let home = Home::new();
    let model = tiny_model(&home, Some(TEMPLATE));
    for flags in CHAINS {
        let Explained { header, tokens, end } = explain(&home, &model, flags);
        assert_eq!(end["num_tokens"].as_u64(), Some(tokens.len() as u64));
        let num_prompt = header["prompt_ids"].as_array().unwrap().len();
        let chain: Vec<&Value> = header["chain"].as_array().unwrap().iter().map(|step| &step["name"]).collect();
        assert_eq!(chain.last().and_then(|name| name.as_str()), Some("draw"), "{flags:?}");
        for (index, token) in tokens.iter().enumerate() {
            let place = format!("{flags:?}, token {index}: {token}");
            assert_eq!(token["index"].as_u64(), Some(index as u64), "{place}");
            assert_eq!(token["position"].as_u64(), Some((num_prompt + index) as u64), "{place}");
            let steps = token["steps"].as_array().unwrap();
            let names: Vec<&Value> = steps.iter().map(|step| &step["name"]).collect();
            assert_eq!(names, chain[..chain.len() - 1], "{place}");
            let mut left = 96;
            for step in steps {
                assert_eq!(step["entered"].as_u64(), Some(left), "{place}");
                left = step["left"].as_u64().unwrap();
                check_step(step, &place);
            }
            check_draw(token, left, &place);
        }
    }
}

/// Probabilities are parts of one, and whoever was cut has none afterwards.
#[track_caller]
fn check_step(step: &Value, place: &str) {
    let candidates = step["candidates"].as_array().unwrap();
    assert!(!candidates.is_empty() && candidates.len() <= 20, "{place}");
    let sum = |field: &str| candidates.iter().map(|candidate| number(&candidate[field])).sum::<f64>();
    assert!(sum("before") < 1.0 + 1e-9 && sum("after") < 1.0 + 1e-9, "{place}");
    let survivors: Vec<&Value> = candidates.iter().filter(|candidate| number(&candidate["after"]) > 0.0).collect();
    if survivors.len() as u64 == step["left"].as_u64().unwrap() {
        assert!((sum("after") - 1.0).abs() < 1e-6, "{place}");
    }
    for candidate in candidates {
        assert!(candidate["cut"] == false || number(&candidate["after"]) == 0.0, "{place}");
        // The model has 96 tokens, its tokenizer 95.
        assert_eq!(candidate["text"].is_string(), number(&candidate["id"]) < 95.0, "{place}");
    }
}

#[track_caller]
fn check_draw(token: &Value, left: u64, place: &str) {
    let draw = &token["draw"];
    assert_eq!(draw["entrants"].as_u64(), Some(left), "{place}");
    assert_eq!(draw["winner"]["id"], token["id"], "{place}");
    assert_eq!(draw["runner_up"].is_null(), left == 1, "{place}");
    let runners = [&draw["winner"], &draw["runner_up"]];
    for runner in runners.into_iter().filter(|runner| !runner.is_null()) {
        let expected = -number(&runner["u"]).ln() / number(&runner["probability"]);
        assert!((number(&runner["time"]) / expected - 1.0).abs() < 1e-6, "{place}");
    }
    if left > 1 {
        assert!(number(&draw["winner"]["time"]) <= number(&draw["runner_up"]["time"]), "{place}");
    }
    let own = token["top"].as_array().unwrap().iter().find(|top| top["id"] == token["id"]);
    if let Some(own) = own {
        assert_eq!(own["logprob"], token["logprob"], "{place}");
    }
}

#[test]
fn the_explained_reply_is_the_reply_of_run() {
    let home = Home::new();
    let model = tiny_model(&home, Some(TEMPLATE));
    for flags in CHAINS {
        let Explained { end, tokens, .. } = explain(&home, &model, flags);
        let base = ["run", "Hello there", "--model", &model, "--seed", "7", "-n", "12"];
        let ran = home.run(&[&base, flags].concat());
        let has_control = tokens.iter().any(|token| token["id"].as_u64().unwrap() < 5);
        if !has_control {
            assert_eq!(
                ran.ok().trim_end_matches('\n'),
                end["text"].as_str().unwrap().trim_end_matches('\n'),
                "{flags:?}"
            );
        }
        let counted = tokens.iter().filter(|token| token["end"].is_null()).count();
        assert!(ran.stderr.contains(&format!(", {counted} out")), "{flags:?}: {counted}, {}", ran.stderr);
    }
}

#[test]
fn a_stop_text_ends_the_explained_reply_where_it_ends_that_of_run() {
    let home = Home::new();
    let model = tiny_model(&home, Some(TEMPLATE));
    let whole = explain(&home, &model, &["--temperature", "1"]);
    let text = whole.end["text"].as_str().unwrap();
    // Two characters, which are two tokens of this model.
    let stop: String = text.chars().skip(4).take(2).collect();
    let flags = ["--temperature", "1", "--stop", &stop];
    let Explained { tokens, end, .. } = explain(&home, &model, &flags);
    let before = &text[..text.find(&stop).unwrap()];
    assert_eq!((end["reason"].as_str(), end["text"].as_str()), (Some("stop_text"), Some(before)), "{text:?}");
    assert!(tokens.len() < whole.tokens.len(), "{text:?}");
    let ids = |tokens: &[Value]| tokens.iter().map(|token| token["id"].clone()).collect::<Vec<_>>();
    assert_eq!(ids(&tokens), ids(&whole.tokens[..tokens.len()]));
    let base = ["run", "Hello there", "--model", &model, "--seed", "7", "-n", "12", "--json"];
    let ran: Value = serde_json::from_str(home.run(&[&base, &flags[..]].concat()).ok()).unwrap();
    assert_eq!((&ran["text"], &ran["tokens"]["output"]), (&end["text"], &Value::from(tokens.len())));
    let page =
        home.run(&["explain", "Hello there", "--model", &model, "--seed", "7", "--temperature", "1", "--stop", &stop]);
    assert!(page.ok().contains("The reply reached a text of --stop"), "{page:?}");
}

#[test]
fn flags_for_several_replies_belong_to_run() {
    let home = Home::new();
    for flag in ["--choices", "--best-of", "--beams"] {
        let refused = home.run(&["explain", "hi", flag, "2"]);
        let expected = format!("error: {flag} belongs to `pellucid run`: explain shows one reply");
        assert!(refused.usage().starts_with(&expected), "{refused:?}");
    }
    let empty = home.run(&["explain", "hi", "--model", "tiny", "--stop", ""]);
    assert!(empty.usage().contains("--stop: expected a text that is not empty"), "{empty:?}");
}

#[test]
fn the_choice_of_an_end_is_explained_too() {
    let home = Home::new();
    let model = tiny_model(&home, Some(TEMPLATE));
    // The second end of the golden's configuration is `</s>`, id 2; a bias makes it win.
    let Explained { tokens, end, .. } = explain(&home, &model, &["--temperature", "0", "--logit-bias", "2=100"]);
    assert_eq!((end["reason"].as_str(), end["text"].as_str()), (Some("end"), Some("")));
    assert_eq!((tokens.len(), tokens[0]["end"].as_str()), (1, Some("end")));
    let Explained { tokens, end, .. } =
        explain(&home, &model, &["--temperature", "0", "--logit-bias", "b=100", "--stop-token", "b"]);
    assert_eq!((end["reason"].as_str(), tokens[0]["text"].as_str()), (Some("stop"), Some("b")));
}

#[test]
fn the_page_fits_eighty_columns_and_has_no_codes() {
    let home = Home::new();
    let model = tiny_model(&home, Some(TEMPLATE));
    for flags in CHAINS {
        for candidates in ["1", "8", "20"] {
            let base =
                ["explain", "Hello there", "--model", &model, "--seed", "7", "-n", "6", "--candidates", candidates];
            let ran = home.run(&[&base, flags].concat());
            let page = ran.ok();
            for line in page.lines() {
                assert!(line.width() <= 80, "{flags:?}: {} columns: {line}", line.width());
                assert!(!line.ends_with(' '), "{flags:?}: {line:?}");
            }
            assert!(page.chars().all(|c| c == '\n' || !c.is_control()), "{flags:?}");
            assert_eq!(page.matches("━━━ token ").count(), page.matches("\n ▶ ").count(), "{flags:?}");
            assert!(page.contains("━━━ the end ━"), "{flags:?}");
        }
    }
}

#[test]
fn greedy_and_default_say_so() {
    let home = Home::new();
    let model = tiny_model(&home, Some(TEMPLATE));
    let page = |flags: &[&str]| {
        let base = ["explain", "Hello", "--model", &model, "-n", "1"];
        home.run(&[&base, flags].concat()).ok().to_owned()
    };
    assert!(page(&[]).contains("seed 0 · preset chat (the default)\n"));
    assert!(page(&["--seed", "5"]).contains("seed 5 · preset chat (the default)\n"));
    let greedy = page(&["--temperature", "0"]);
    assert!(greedy.contains("at temperature 0 the highest logit wins") && !greedy.contains("preset"), "{greedy}");
    // A flag at its neutral value is a flag all the same.
    assert!(page(&["--top-k", "0"]).contains("preset chat (the default) with flags"));
}

#[test]
fn colour_is_only_colour() {
    let home = Home::new();
    let model = tiny_model(&home, Some(TEMPLATE));
    let page = |color: &str| {
        home.run(&["explain", "Hello", "--model", &model, "--seed", "1", "-n", "2", "--color", color]).ok().to_owned()
    };
    let colored = page("always");
    assert!(colored.contains("\x1b[1;32m"), "{colored}");
    let bare: String = colored.split('\x1b').skip(1).map(|part| part.split_once('m').unwrap().1).collect();
    let plain = page("never");
    assert_eq!(plain, page("auto"), "not a terminal");
    // Without colour the new token is marked by a line of its own.
    let is_mark = |line: &&str| !line.is_empty() && line.chars().all(|c| matches!(c, ' ' | '^'));
    let trimmed =
        |text: &str| text.lines().filter(|l| !is_mark(l)).map(|l| l.trim_end().to_owned()).collect::<Vec<_>>();
    assert_eq!(trimmed(&bare), trimmed(&plain));
}

#[test]
fn what_cannot_be_is_refused_by_name() {
    let home = Home::new();
    let model = tiny_model(&home, None);
    let cases: [(&[&str], &str); 8] = [
        (&["explain", "hi", "--temperature", "-1"], "temperature"),
        (&["explain", "hi", "--candidates", "21"], "--candidates"),
        (&["explain", "hi", "--candidates", "0"], "--candidates"),
        (&["explain", "hi", "--color", "blue"], "--color"),
        (&["explain", "  "], "the prompt is empty"),
        (&["explain", "hi", "--system", "x"], "--system"),
        (&["explain", "hi", "--samplers", "draw"], "draw"),
        (&["explain", "hi", "--top-p", "1.5"], "--top-p: expected 0 to 1"),
    ];
    for (args, expected) in cases {
        let ran = home.run(&[args, &["--model", &model]].concat());
        assert!(ran.status != Some(0) && ran.stderr.contains(expected) && ran.stdout.is_empty(), "{args:?}: {ran:?}");
    }
}

#[test]
fn the_page_uses_the_width_that_it_has() {
    let home = Home::new();
    let model = tiny_model(&home, Some(TEMPLATE));
    let chain = ["--temperature", "1.3", "--top-k", "20", "--top-p", "0.95", "--seed", "4"];
    let page = |columns: Option<&str>, flags: &[&str]| {
        let args = [&["explain", "Hello there", "-m", &model, "-n", "3"], &chain[..], flags].concat();
        let mut command = home.command(&args);
        command.envs(columns.map(|columns| ("COLUMNS", columns)));
        crate::support::Ran::from(command.output().unwrap()).ok().to_owned()
    };
    let longest = |text: &str| text.lines().map(|line| line.chars().count()).max().unwrap();
    for columns in ["50", "80", "120", "200"] {
        let text = page(Some(columns), &[]);
        assert_eq!(longest(&text), columns.parse::<usize>().unwrap(), "{columns}: {text}");
        assert!(text.contains("how to read the tables") && text.contains("\n ▶ "), "{text}");
        let wide = text.contains("too narrow for the columns");
        assert!(!wide, "four steps fit into {columns} columns: {text}");
    }
    assert_eq!(longest(&page(None, &[])), 80, "a pipe");
    assert_eq!(longest(&page(Some("120"), &["--width", "60"])), 60, "the flag goes before the environment");
    assert_eq!(longest(&page(Some("7"), &[])), 50, "narrower terminals wrap the lines themselves");
    assert_eq!(page(Some("x"), &[]), page(None, &[]));
}

#[test]
fn the_inside_of_the_model_is_shown_for_one_token() {
    let home = Home::new();
    let model = tiny_model(&home, Some(TEMPLATE));
    let model = model.as_str();
    let flags = ["--layers", "--attention", "1.0", "--token", "3", "--temperature", "0"];
    let found = explain(&home, model, &flags).tokens;
    let at = found.iter().position(|line| line["type"] == "probe").expect("a probe");
    let (token, probe) = (&found[at - 1], &found[at]);
    assert_eq!((&probe["index"], &probe["id"]), (&token["index"], &token["id"]));
    assert_eq!(token["index"], 2);
    let last = probe["layers"].as_array().unwrap().last().unwrap();
    assert_eq!(last["logprob"], token["logprob"], "the last layer has the model's own log probabilities");
    let weights = probe["attention"]["weights"].as_array().unwrap();
    assert_eq!(weights.len(), probe["attention"]["tokens"].as_array().unwrap().len());
    let base = ["explain", "Hello there", "--model", model, "-n", "3", "--color", "never"];
    let page = home.run(&[&base[..], &flags].concat());
    assert!(page.ok().contains("layers: the guess after each layer"), "{page:?}");
    assert!(page.ok().contains("attention of layer 1, head 0"), "{page:?}");
    let far = home.run(&[&base[..], &["--attention", "99"]].concat());
    assert!(far.usage().contains("--attention: expected a layer from 0 to"), "{far:?}");
}

#[test]
fn guards_decide_which_tokens_are_explained() {
    let home = Home::new();
    let model = tiny_model(&home, Some(TEMPLATE));
    let file = home.path().join("patterns.txt");
    let base = ["explain", "Hi", "--model", &model, "-n", "16", "--temperature", "1.5", "--seed", "4", "--min-tokens"];
    let base = [&base[..], &["16", "--json"]].concat();
    let lines = |more: &[&str]| -> Vec<Value> {
        let ran = home.run(&[&base[..], more].concat());
        ran.ok().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let guard = ["--guard-patterns", file.to_str().unwrap()];
    let free = lines(&[]);
    std::fs::write(&file, "no such text\n").unwrap();
    let passed = lines(&guard);
    assert_eq!(free.len(), passed.len());
    for (free, passed) in free.iter().zip(&passed).filter(|(free, _)| free["type"] == "token") {
        assert_eq!((&free["id"], &free["logprob"]), (&passed["id"], &passed["logprob"]));
        assert_eq!(passed["guards"], serde_json::json!([{ "guard": "patterns", "verdict": "passed" }]));
        assert!(free.get("guards").is_none());
    }
    let text = passed.last().unwrap()["text"].as_str().unwrap();
    let from = text.char_indices().nth(text.chars().count() / 2).unwrap().0;
    let phrase: String = text[from..].chars().take(4).collect();
    let expression: String = phrase.chars().map(|c| format!("\\x{{{:x}}}", u32::from(c))).collect();
    std::fs::write(&file, format!("(?-i){expression}\n")).unwrap();
    let blocked = lines(&guard);
    let end = blocked.last().unwrap();
    assert_eq!(end["reason"].as_str().or(end["end"].as_str()), Some("content_filter"), "{end}");
    assert!(blocked.len() < free.len(), "tokens that are blocked are not explained");
    let shown = end["text"].as_str().unwrap();
    assert!(text.split_once(&phrase).unwrap().0.starts_with(shown), "{shown:?} of {text:?}");
    // A prompt that is blocked is not explained at all.
    std::fs::write(&file, "hi\n").unwrap();
    let ran = home.run(&[&base[..], &guard].concat());
    assert!(ran.stdout.is_empty() && ran.stderr.contains("the prompt was blocked by the guard patterns"), "{ran:?}");
    assert!(ran.stderr.contains("[guard: 1 pattern of "), "{ran:?}");
}

#[test]
fn a_probe_of_what_is_not_there_is_refused_by_its_flag() {
    let home = Home::new();
    for (flags, expected) in [
        (["--attention", "9"], "--attention: expected a layer from 0 to 4, found 9"),
        (["--attention", "1.99"], "--attention: expected a head from 0 to 7, found 99"),
        (["--layers", "--token=4"], "--token: expected 1 to 3, found 4"),
    ] {
        let ran = home.run(&["explain", "-m", "tiny", flags[0], flags[1], "-n", "3", "Once upon a time"]);
        assert!(ran.stderr.contains(expected), "{}", ran.stderr);
    }
}
