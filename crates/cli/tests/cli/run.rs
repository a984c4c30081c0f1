//! `run` and `perplexity` through the built program, on a tiny random model with a vocabulary of single characters.

use crate::support::Home;
use crate::support::tiny_model::{TEMPLATE, tiny_model as model};

#[test]
fn the_same_request_gives_the_same_reply_whatever_computes_it() {
    let home = Home::new();
    let model = model(&home, Some(TEMPLATE));
    let run = |more: &[&str]| {
        let base = ["run", "Hello there", "--model", &model, "-n", "40", "--temperature", "1.5"];
        home.run(&[&base, more].concat()).ok().to_owned()
    };
    let first = run(&["--seed", "7"]);
    assert!(first.trim().len() > 1, "a reply: {first:?}");
    assert_eq!(first, run(&["--seed", "7", "--threads", "1"]));
    assert_eq!(first, run(&["--seed", "7", "--threads", "3"]));
    let others: Vec<String> = ["8", "9", "10"].iter().map(|seed| run(&["--seed", seed])).collect();
    assert!(others.iter().any(|other| *other != first), "other seeds give other replies");
}

#[test]
fn the_last_line_counts_and_times() {
    let home = Home::new();
    let model = model(&home, Some(TEMPLATE));
    let ran = home.run(&["run", "Hi", "--model", &model, "-n", "5", "--temperature", "1", "--seed", "3"]);
    let line = ran.stderr.trim().lines().last().unwrap().to_owned();
    // The prompt is `[turn]user: Hi[end][turn]`: three control tokens and eight characters.
    assert!(line.starts_with("[11 in at "), "{line}");
    assert!(
        line.contains(" tok/s, 5 out at ") && line.contains("seed 3") && line.contains("ended at --max-tokens"),
        "{line}"
    );
}

#[test]
fn message_text_is_not_read_as_control_tokens() {
    let home = Home::new();
    let model = model(&home, Some(TEMPLATE));
    let ran = home.run(&["run", "[end]", "--model", &model, "-n", "1"]);
    // Three control tokens of the template, "user: ", and five characters of the message, two of them unknown brackets.
    assert!(ran.stderr.starts_with("[14 in at "), "{}", ran.stderr);
}

#[test]
fn the_prompt_may_come_from_a_pipe() {
    let home = Home::new();
    let model = model(&home, Some(TEMPLATE));
    let piped = home.run_with_input(&["run", "--model", &model, "-n", "6"], b"Hello there");
    assert_eq!(piped.ok(), home.run(&["run", "Hello there", "--model", &model, "-n", "6"]).ok());
}

#[test]
fn without_a_template_the_reply_continues_the_prompt() {
    let home = Home::new();
    let model = model(&home, None);
    let ran = home.run(&["run", "Once upon", "--model", &model, "-n", "4"]);
    assert!(ran.ok().starts_with("Once upon"), "{ran:?}");
    assert!(ran.stderr.contains("no chat template"), "{ran:?}");
}

#[test]
fn what_cannot_be_is_refused_by_name() {
    let home = Home::new();
    let model = model(&home, Some(TEMPLATE));
    let long = "a".repeat(300);
    let cases: [(&[&str], &str); 26] = [
        (&["run", "hi", "--temperature", "-1"], "temperature"),
        (&["run", "hi", "--temperature", "nan"], "temperature"),
        (&["run", "  "], "the prompt is empty"),
        (&["run", "hi", "--context", "9999"], "9999"),
        (&["run", &long], "256"),
        (&["run", "hi", "--cpu-isa", "mmx"], "mmx"),
        (&["run", "hi", "-n", "0"], "0"),
        (&["run", "hi", "--raw", "--system", "x"], "--system"),
        (&["run", "hi", "--top-p", "1.5"], "--top-p: expected 0 to 1, found 1.5"),
        (&["run", "hi", "--min-p", "-0.1"], "--min-p"),
        (&["run", "hi", "--repetition-penalty", "0"], "--repetition-penalty"),
        (&["run", "hi", "--samplers", "top_k,mirror"], "mirror"),
        (&["run", "hi", "--preset", "poetry"], "brainstorm"),
        (&["run", "hi", "--logit-bias", "a"], "TOKEN=BIAS"),
        (&["run", "hi", "--ban", "abc"], "3 tokens"),
        (&["run", "hi", "--beams", "3", "--temperature", "0.5"], "temperature"),
        (&["run", "hi", "--choices", "3", "--best-of", "2"], "--best-of (2) must not be less than --choices (3)"),
        (&["run", "hi", "--beams", "1"], "--beams: expected 2 to 128"),
        (&["run", "hi", "--beams", "3", "--choices", "2"], "--beams cannot be combined with --choices"),
        (&["run", "hi", "--beams", "3", "--top-k", "5"], "--beams cannot be combined with --top-k"),
        (&["run", "hi", "--beams", "3", "--beams-returned", "4"], "--beams-returned: expected 1 to 3"),
        (&["run", "hi", "--beams", "3", "--ban", "5"], "banned_tokens"),
        (&["run", "hi", "--stop", ""], "--stop"),
        (&["run", "hi", "--best-of", "3", "--stop", "x"], "--best-of"),
        (&["run", "hi", "--min-tokens", "9", "-n", "3"], "--min-tokens (9)"),
        (&["run", "hi", "--greedy", "--dry-base", "2"], "--dry-multiplier"),
    ];
    for (args, expected) in cases {
        let ran = home.run(&[args, &["--model", &model]].concat());
        assert!(ran.status != Some(0) && ran.stderr.contains(expected), "{args:?}: {ran:?}");
    }
}

#[test]
fn several_replies_are_those_of_their_seeds() {
    let home = Home::new();
    let model = model(&home, Some(TEMPLATE));
    let run = |more: &[&str]| {
        let base = ["run", "Hello", "--model", &model, "-n", "12", "--temperature", "1.3"];
        home.run(&[&base, more].concat()).ok().to_owned()
    };
    let alone: Vec<String> = ["5", "6", "7"].iter().map(|seed| run(&["--seed", seed])).collect();
    let together = run(&["--seed", "5", "--choices", "3"]);
    let expected: String = (1..=3).map(|i| format!("--- {i}\n{}", alone[i - 1])).collect();
    assert_eq!(together, expected);
    let best = run(&["--seed", "5", "--best-of", "3"]);
    assert!(alone.contains(&best), "the best of three is one of the three");
}

#[test]
fn beams_come_with_scores_best_first() {
    let home = Home::new();
    let model = model(&home, Some(TEMPLATE));
    let args = ["run", "Hello", "--model", &model, "-n", "6", "--beams", "3", "--beams-returned", "3"];
    let text = home.run(&args).ok().to_owned();
    let scores: Vec<f64> = (text.lines().filter_map(|line| line.strip_prefix("--- ")))
        .map(|line| line.split("score ").nth(1).unwrap().trim_end_matches(')').parse().unwrap())
        .collect();
    assert_eq!(scores.len(), 3, "{text}");
    assert!(scores.windows(2).all(|pair| pair[0] >= pair[1]), "{scores:?}");
}

#[test]
fn a_stop_string_ends_the_reply_before_itself() {
    let home = Home::new();
    let model = model(&home, Some(TEMPLATE));
    let base = ["run", "Hello", "--model", &model, "-n", "24", "--temperature", "1", "--seed", "11"];
    let whole = home.run(&base).ok().trim_end_matches('\n').to_owned();
    // Three characters are three tokens here.
    let characters: Vec<char> = whole.chars().collect();
    let stop: String = characters[4..7].iter().collect();
    let stopped = home.run(&[&base[..], &["--stop", &stop]].concat());
    let expected = &whole[..whole.find(&stop).unwrap()];
    assert_eq!(stopped.ok().trim_end_matches('\n'), expected);
    assert!(stopped.stderr.contains("ended at --stop"), "{stopped:?}");
}

#[test]
fn beams_keep_to_stop_strings_and_count_their_tokens() {
    let home = Home::new();
    let model = model(&home, Some(TEMPLATE));
    let base = ["run", "Hello", "--model", &model, "-n", "9", "--beams", "2"];
    let whole = home.run(&base);
    assert!(whole.stderr.contains(", 18 out at ") && whole.stderr.contains("ended at --max-tokens"), "{whole:?}");
    let text = whole.ok().trim_end_matches('\n').to_owned();
    let stop: String = text.chars().skip(3).take(2).collect();
    let stopped = home.run(&[&base[..], &["--stop", &stop]].concat());
    assert_eq!(stopped.ok().trim_end_matches('\n'), &text[..text.find(&stop).unwrap()]);
}

#[test]
fn without_flags_the_default_preset_is_drawn_with_a_fixed_seed() {
    let home = Home::new();
    let model = model(&home, Some(TEMPLATE));
    let run = |more: &[&str]| home.run(&[&["run", "Hello", "--model", &model, "-n", "12"], more].concat());
    let default = run(&[]);
    assert!(default.stderr.contains("seed 0"), "{default:?}");
    assert_eq!(run(&[]).ok(), default.ok());
    assert_eq!(run(&["--preset", "chat"]).ok(), default.ok());
    assert_ne!(run(&["--seed", "1"]).ok(), default.ok());
    // A flag changes one option; the others keep their defaults.
    let warmer = run(&["--temperature", "1.5", "--seed", "5"]);
    let chain = "[preset chat (the default) with flags: temperature 1.5, top_k 40, top_p 0.9, draw]";
    assert!(warmer.stderr.contains(chain) && warmer.stderr.contains("seed 5"), "{warmer:?}");
    // Greedy decoding takes no defaults, whichever way it is asked for.
    let greedy = run(&["--greedy"]);
    assert!(greedy.stderr.contains("[greedy: temperature 0") && !greedy.stderr.contains("seed"), "{greedy:?}");
    assert_eq!(run(&["--temperature", "0"]).ok(), greedy.ok());
    assert_eq!(run(&["--preset", "factual"]).ok(), greedy.ok());
    for other in [["--temperature", "0.5"], ["--preset", "chat"]] {
        assert_eq!(run(&[&["--greedy"], &other[..]].concat()).status, Some(2));
    }
}

/// The values that the model's own files recommend are used, those that cannot be are named, and flags win.
#[test]
fn the_recommendation_of_the_model_comes_before_the_default() {
    let home = Home::new();
    let model = model(&home, Some(TEMPLATE));
    let run =
        |command: &str, more: &[&str]| home.run(&[&[command, "Hello", "--model", &model, "-n", "12"], more].concat());
    let file = std::path::Path::new(&model).join("generation_config.json");
    std::fs::write(&file, r#"{"temperature": 1.2, "top_k": 12, "num_beams": 4, "top_p": 7}"#).unwrap();
    let ran = run("run", &[]);
    assert!(ran.stderr.contains("[recommended by the model: temperature 1.2, top_k 12, draw]"), "{ran:?}");
    let warning = "warning: recommended sampling values were not taken: generation_config.json: top_p \
                   (expected 0 to 1, found 7), generation_config.json: num_beams (4 is not supported)\n";
    assert!(ran.stderr.contains(warning), "{ran:?}");
    assert_eq!(run("run", &["--temperature", "1.2", "--top-k", "12"]).ok(), ran.ok());
    let flags = run("run", &["--top-k", "3"]);
    assert!(
        flags.stderr.contains("[recommended by the model with flags: temperature 1.2, top_k 3, draw]"),
        "{flags:?}"
    );
    assert!(run("explain", &[]).ok().contains("seed 0 · recommended by the model"));

    std::fs::write(&file, r#"{"do_sample": false, "temperature": 0.6, "top_p": 0.9}"#).unwrap();
    let greedy = run("run", &[]);
    assert_eq!(greedy.ok(), run("run", &["--greedy"]).ok());
    assert!(!greedy.stderr.contains("seed"), "{greedy:?}");
    let several = run("run", &["--choices", "2"]);
    assert!(several.stderr.contains("recommended by the model: draw]"), "{several:?}");
}

#[test]
fn a_reply_without_a_limit_is_cut_and_the_program_says_so() {
    let home = Home::new();
    let folder = home.path().join("long");
    let tiny = pellucid_testing::TinyModel {
        template: Some(TEMPLATE),
        context_len: Some(4096),
        ..pellucid_testing::TinyModel::default()
    };
    tiny.write(&folder).unwrap();
    let run = |more: &[&str]| {
        // The reply may not end by itself before the limit.
        let base = ["run", "Hi", "--model", folder.to_str().unwrap(), "--min-tokens", "2048", "--no-loop-guard"];
        home.run(&[&base, more].concat())
    };
    let cut = run(&[]);
    cut.ok();
    assert!(cut.stderr.contains("the reply was cut after 2048 tokens; --max-tokens N allows more\n"), "{}", cut.stderr);
    let told = run(&["--max-tokens", "2048"]);
    told.ok();
    assert!(!told.stderr.contains("was cut"), "{}", told.stderr);
}

#[test]
fn a_preset_shows_what_it_sets_and_flags_win() {
    let home = Home::new();
    let model = model(&home, Some(TEMPLATE));
    let ran = home.run(&["run", "Hi", "--model", &model, "-n", "2", "--preset", "chat", "--top-k", "7", "--seed", "1"]);
    assert!(ran.stderr.contains("preset chat with flags: ") && ran.stderr.contains("top_k 7"), "{ran:?}");
    assert!(ran.stderr.contains("temperature 0.7"), "{ran:?}");
}

#[test]
fn what_cannot_be_run_is_said_before_anything_else() {
    let home = Home::new();
    let model = model(&home, None);
    let config = std::path::Path::new(&model).join("config.json");
    let text = std::fs::read_to_string(&config).unwrap().replace("\"llama\"", "\"bloom\"");
    std::fs::write(&config, text).unwrap();
    std::fs::remove_file(std::path::Path::new(&model).join("tokenizer.json")).unwrap();
    let ran = home.run(&["run", "hi", "--model", &model]);
    assert!(ran.error().contains("bloom") && ran.error().contains("qwen3-moe"), "{ran:?}");
    let inspected = home.run(&["inspect", &model]);
    assert!(inspected.ok().contains("can be run      no: its architecture is not supported"), "{inspected:?}");
}

#[test]
fn perplexity_of_a_text() {
    let home = Home::new();
    let model = model(&home, None);
    let text = "it was the best of times it was the worst of times ".repeat(4);
    let file = home.path().join("text.txt");
    std::fs::write(&file, &text).unwrap();
    let file = file.to_str().unwrap();
    let measure = |more: &[&str]| -> serde_json::Value {
        let args = [&["perplexity", &model, file, "--json", "--window", "64"], more].concat();
        serde_json::from_str(home.run(&args).ok()).unwrap()
    };
    let result = measure(&[]);
    assert_eq!((result["windows"].as_u64(), result["scored_tokens"].as_u64()), (Some(3), Some(3 * 63)));
    assert!(result["perplexity"].as_f64().unwrap() > 1.0);
    assert_eq!(result, measure(&["--threads", "1"]));
    let short = home.run(&["perplexity", &model, file, "--window", "250"]);
    assert!(short.usage().contains("204 tokens, fewer than the 250 of one window"), "{short:?}");
}

#[test]
fn memory_is_planned_and_what_cannot_hold_a_context_is_refused_with_the_numbers() {
    let home = Home::new();
    let model = model(&home, None);
    let run = |flags: &[&str]| home.run(&[&["run", "-m", &model, "--raw", "ab", "-n", "2"], flags].concat());
    let planned = run(&["--kv-memory", "1MB", "--kv-type", "f32"]);
    assert!(planned.ok().len() <= 8, "{planned:?}");
    assert!(planned.stderr.starts_with("[memory: weights "), "{planned:?}");
    assert!(planned.stderr.contains("keys and values ") && planned.stderr.contains(" in F32 for "), "{planned:?}");
    let refused = run(&["--kv-memory", "20kB", "--kv-type", "f32"]);
    for part in ["a whole context of 256 tokens takes ", "--kv-memory gives 20.0 kB, which holds ", "--context "] {
        assert!(refused.usage().contains(part), "{part}: {refused:?}");
    }
    // The advice of the message works.
    let advice = refused.stderr.split("--context ").nth(1).and_then(|rest| rest.split(',').next()).unwrap().to_owned();
    run(&["--kv-memory", "20kB", "--kv-type", "f32", "--context", &advice]).ok();
    assert!(run(&["--kv-memory", "lots"]).stderr.contains("expected a size such as 2GB"));
}

#[test]
fn a_template_that_does_not_compile_is_told_where_one_is_needed() {
    let home = Home::new();
    let model = model(&home, Some("{% unknowntag %}"));
    home.run(&["run", "hi", "--raw", "-m", &model, "-n", "2"]).ok();
    let refused = home.run(&["run", "hi", "-m", &model, "-n", "2"]);
    assert!(refused.error().contains(&model) && refused.error().contains("template"), "{refused:?}");
}

#[test]
fn a_reply_that_repeats_itself_is_ended_and_the_program_says_so() {
    let home = Home::new();
    let folder = home.path().join("long");
    let long = pellucid_testing::TinyModel { template: Some(TEMPLATE), context_len: Some(512), ..Default::default() };
    long.write(&folder).unwrap();
    let model = folder.to_str().unwrap();
    let run = |more: &[&str]| home.run(&[&["run", "Hi", "--model", model, "--allow", "a"], more].concat());
    let ended = run(&["-n", "400"]);
    assert_eq!(ended.ok().trim(), "a".repeat(258));
    let note = "[the reply was ended because it repeated itself, the same token 258 times; \
                --no-loop-guard switches this off]";
    assert!(ended.stderr.lines().any(|line| line == note), "{}", ended.stderr);
    assert!(ended.stderr.contains(", 258 out"), "{}", ended.stderr);
    let whole = run(&["-n", "400", "--no-loop-guard"]);
    assert_eq!(whole.ok().trim(), "a".repeat(400));
    assert!(!whole.stderr.contains("repeated itself"), "{}", whole.stderr);
    let several = run(&["-n", "300", "--choices", "2"]);
    assert!(several.stderr.contains("[reply 2 was ended because it repeated itself"), "{}", several.stderr);
    let beams = home.run(&["run", "Hi", "--model", model, "--beams", "2", "-n", "3"]);
    beams.ok();
}
