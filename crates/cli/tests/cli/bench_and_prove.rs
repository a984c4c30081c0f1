//! `bench` and `prove` through the built program, on the golden fixtures.

use crate::serve::Served;
use crate::several_models::folder_of;
use crate::support::Home;
use serde_json::Value;
use std::path::Path;

fn golden(name: &str) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../selftest/fixtures/goldens");
    folder.join(name).to_str().unwrap().to_owned()
}

#[test]
fn replies_are_batch_invariant_over_thousands_of_prompts() {
    // Plain attention; a window in every other layer and soft caps; experts; learned positions.
    for name in ["llama3", "gemma2", "qwen3-moe", "gpt2", "phi3"] {
        let ran =
            Home::new().run(&["prove", &golden(name), "--json", "--prompts", "400", "--longest", "34", "--reply", "5"]);
        let proof: Value = serde_json::from_str(ran.ok()).unwrap();
        assert_eq!(proof["different"], 0, "{name}");
        let settings = proof["settings"].as_array().unwrap();
        assert!(settings.len() >= 9 && settings.iter().all(|setting| setting["num_replies"] == 400), "{name}: {proof}");
        let total = |count: &str| settings.iter().map(|setting| setting[count].as_u64().unwrap()).sum::<u64>();
        assert!(total("cached_tokens") > 0 && total("preemptions") > 0, "{name}: {proof}");
        assert_eq!(total("num_tokens"), settings.len() as u64 * 400 * 5, "{name}");
    }
}

#[test]
fn a_proof_ends_with_a_verdict() {
    let ran = Home::new().run(&["prove", &golden("llama3"), "--prompts", "8", "--longest", "20", "--reply", "3"]);
    assert!(ran.ok().ends_with("proved: no reply depended on the other requests, to the bit\n"), "{ran:?}");
}

#[test]
fn servers_are_compared_with_each_other() {
    let home = Home::new();
    let serve = |context| Served::start(&home, &["--model", "tiny", "--device", "cpu", "--context", context], &[]);
    let (first, second) = (serve("128"), serve("128"));
    let [one, two] = [&first, &second].map(|served| format!("http://{}/v1", served.address));
    let flags = ["--prompts", "12", "--longest", "40", "--reply", "5", "--together", "4"];
    let equal = home.run(&[&["prove", "--against", &one, &two], &flags[..]].concat());
    let verdict = "proved: the servers have one fingerprint and give the same replies, to the bit\n";
    assert!(equal.ok().ends_with(verdict), "{equal:?}");
    assert_eq!(equal.ok().matches("http://").count(), 4, "two settings for each server: {equal:?}");

    // Other weights, and another instruction set.
    let folder = folder_of(&home, &["tiny"]);
    let other = Served::start(&home, &["--model", &format!("{folder}/tiny"), "--device", "cpu"], &[]);
    let scalar = Served::start(&home, &["--model", "tiny", "--device", "cpu", "--cpu-isa", "scalar"], &[]);
    let [other, scalar] = [&other, &scalar].map(|served| format!("http://{}", served.address));
    let against = |url: &str| {
        let ran = home.run(&[&["prove", "tiny", "--json", "--against", &one, "--against", url], &flags[..]].concat());
        assert!(ran.stderr.contains("do not put them behind one gateway"), "{ran:?}");
        serde_json::from_slice::<Value>(&ran.stdout).unwrap()
    };
    let refuted = against(&other);
    assert_eq!((&refuted["verdict"], &refuted["different"]), (&"refuted".into(), &24.into()), "{refuted}");
    assert!(refuted["servers"][2]["difference"].as_str().unwrap().contains(", token 1 is "), "{refuted}");
    let refuted = against(&scalar);
    assert_eq!((&refuted["verdict"], &refuted["one_fingerprint"]), (&"refuted".into(), &false.into()), "{refuted}");

    home.run(&["prove", "--against", &one, "--device", "cpu"]).usage();
    assert!(home.run(&["prove", "--against", "127.0.0.1:1"]).usage().contains("expected an address such as http://"));
    assert!(home.run(&["prove", "--against", "http://127.0.0.1:1"]).error().contains("no server answers at http://"));
}

#[test]
fn the_self_test_proves_batch_invariance_too() {
    let ran = Home::new().run(&["selftest", "--device", "cpu"]);
    let line = ran.ok().lines().find(|line| line.contains("prove: ")).unwrap();
    assert!(line.starts_with("ok "), "{ran:?}");
}

#[test]
fn a_context_that_is_too_small_is_told() {
    let ran = Home::new().run(&["prove", &golden("llama3"), "--longest", "4000"]);
    assert!(ran.usage().contains("--longest and --reply need 4016 tokens, but the model's context holds"), "{ran:?}");
}

#[test]
fn speed_and_serving_in_numbers() {
    let flags = ["--prompt", "16", "--batch", "1,3", "--depth", "0,20", "--generate", "3", "--repeat", "2"];
    let serving = ["--concurrency", "1,4", "--rate", "200", "--requests", "8", "--input", "4-12", "--output", "5"];
    let model = golden("llama3");
    let ran = Home::new().run(&[&["bench", &model, "--json"], &flags[..], &serving[..]].concat());
    let result: Value = serde_json::from_str(ran.ok()).unwrap();
    assert!(result["machine"]["read_bytes_per_second"].as_f64().unwrap() > 1e6, "{result}");
    let speed = result["speed"].as_array().unwrap();
    assert_eq!(speed.len(), 5, "a prefill, and two batch sizes at two depths");
    for row in speed {
        let (median, best) =
            (row["tokens_per_second"].as_f64().unwrap(), row["best_tokens_per_second"].as_f64().unwrap());
        assert!(median > 0.0 && best >= median, "{row}");
        assert_eq!(row["fraction_of_read_limit"].is_null(), row["what"] == "prefill", "{row}");
    }
    let levels = result["serving"].as_array().unwrap();
    assert_eq!(levels.len(), 3);
    for level in levels {
        assert_eq!(level["requests"], 8);
        assert_eq!(level["decode_tokens"].as_u64().unwrap(), 8 * 4, "the first of five comes with the prompt: {level}");
        let first = &level["time_to_first_token"];
        assert!(first["p50_ms"].as_f64().unwrap() <= first["p99_ms"].as_f64().unwrap(), "{level}");
        let share = level["engine_share"].as_f64().unwrap();
        assert!((0.0..1.0).contains(&share), "{level}");
    }
    // As text: the same numbers in tables of 80 columns.
    let ran = Home::new().run(&[&["bench", &model], &flags[..], &serving[..]].concat());
    let text = ran.ok();
    assert!(text.contains("decode x 3 at 20") && text.contains("4 at once") && text.contains("200 a second"), "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
}

#[test]
fn a_random_model_can_be_written_and_used() {
    let home = Home::new();
    let path = home.path().join("random.gguf");
    let path = path.to_str().unwrap();
    let ran = home.run(&["bench", "--shape", "smollm2-135m", "--type", "q4_0", "--write", path]);
    assert_eq!(ran.ok(), "");
    let about: Value = serde_json::from_str(home.run(&["inspect", path, "--json"]).ok()).unwrap();
    assert!(about.to_string().contains("134515008"), "{about}");
    // An existing file is not overwritten.
    let again = home.run(&["bench", "--shape", "smollm2-135m", "--type", "q4_0", "--write", path]);
    assert!(again.usage().contains("exists already"), "{again:?}");
    assert!(home.run(&["bench", path, "--shape", "smollm2-135m"]).stderr.contains("cannot be used with"));
    let refused = home.run(&["bench", &golden("llama3"), "--depth", "100000"]);
    assert!(refused.usage().contains("the model's context holds"), "{refused:?}");
}

#[test]
fn questions_are_answered_and_counted() {
    let home = Home::new();
    let file = home.path().join("questions.toml");
    let questions = "[[question]]\nname = 'story'\nask = 'Once upon a time'\nexpect = [['girl', 'boy']]\n\
                     [[question]]\nname = 'sum'\nask = 'What is 1 + 1?'\nexpect = [['no such text']]\n";
    std::fs::write(&file, questions).unwrap();
    let flag = format!("--questions={}", file.display());
    let run = |more: &[&str]| home.run(&[&["bench", "tiny", &flag, "-n", "400", "--greedy"], more].concat());
    let result: Value = serde_json::from_str(run(&["--json"]).ok()).unwrap();
    assert_eq!((&result["passed"], &result["total"]), (&1.into(), &2.into()), "{result}");
    let [story, sum] = [0, 1].map(|index| &result["questions"][index]);
    assert_eq!(story["verdict"], "pass", "{result}");
    // The story model does not answer: its reply is wrong, or does not end.
    assert_ne!(sum["verdict"], "pass", "{result}");
    // The reply and its number of tokens are those of `run`.
    let ran = home.run(&["run", "--model", "tiny", "-n", "400", "--greedy", "--json", "Once upon a time"]);
    let reply: Value = serde_json::from_str(ran.ok()).unwrap();
    assert_eq!(story["reply"], reply["text"], "{reply}");
    assert!(story["tokens"].as_u64().unwrap() > 20, "{story}");
    let table = run(&[]).ok().to_owned();
    assert!(table.contains("story") && table.contains("1 of 2 passed (50.0 %): "), "{table}");
    assert!(home.run(&["bench", "tiny", "--top-k", "3"]).stderr.contains("sampling flags apply to --questions"));
}

#[test]
fn a_proof_with_a_draft_model_measures_its_acceptance() {
    let flags = ["--prompts", "16", "--longest", "20", "--reply", "6"];
    // Neither model has a vocabulary; a model as its own draft model is nearly always right.
    for (draft, is_accepted) in [("llama3", true), ("gpt2", false)] {
        let draft = golden(draft);
        let ran = Home::new().run(&[&["prove", &golden("llama3"), "--json", "--draft", &draft], &flags[..]].concat());
        let proof: Value = serde_json::from_str(ran.ok()).unwrap();
        assert_eq!(proof["different"], 0, "{proof}");
        let settings = proof["settings"].as_array().unwrap();
        let of = |name: &str| settings.iter().find(|setting| setting["name"] == name).unwrap();
        for name in ["draft model, together", "draft model, alone", "drafts, every third wrong"] {
            let (drafted, accepted) = (of(name)["drafted"].as_u64().unwrap(), of(name)["accepted"].as_u64().unwrap());
            assert!(drafted > 0, "{name}: {proof}");
            assert!(name.starts_with("drafts,") || is_accepted == (2 * accepted > drafted), "{name}: {proof}");
        }
        let speeds = proof["draft_model"].as_array().unwrap();
        let temperatures: Vec<f64> = speeds.iter().map(|speed| speed["temperature"].as_f64().unwrap()).collect();
        assert!(temperatures.len() == 3 && temperatures[0] == 0.0 && temperatures[2] == 1.5, "{proof}");
        assert!(speeds.iter().all(|speed| speed["tokens_per_second"].as_f64().unwrap() > 0.0), "{proof}");
    }
    let ran = Home::new().run(&[&["prove", &golden("llama3"), "--draft", &golden("llama2")], &flags[..]].concat());
    let text = ran.ok();
    assert!(text.contains("temperature 0.7") && text.contains("drafts looked up"), "{text}");
    assert!(text.ends_with("proved: no reply depended on the other requests, to the bit\n"), "{text}");
    assert!(text.lines().skip(1).all(|line| line.chars().count() <= 80), "{text}");
}

#[test]
fn a_draft_model_with_another_vocabulary_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    pellucid_testing::tiny_model(folder.path(), None);
    let ran = Home::new().run(&["prove", "tiny", "--draft", folder.path().to_str().unwrap()]);
    assert!(ran.usage().contains("the vocabularies differ"), "{ran:?}");
}

#[test]
fn tasks_are_answered_with_and_without_drafts() {
    let home = Home::new();
    let file = home.path().join("tasks.toml");
    let tasks = "[[task]]\nkind = 'story'\nname = 'a'\nask = 'Once upon a time'\n\
                 [[task]]\nkind = 'story'\nname = 'b'\nask = 'Once upon a time there was a girl. Once upon a time'\n";
    std::fs::write(&file, tasks).unwrap();
    let flag = format!("--tasks={}", file.display());
    let run = |more: &[&str]| home.run(&[&["bench", "tiny", &flag, "-n", "40", "--repeat", "1"], more].concat());
    let result: Value = serde_json::from_str(run(&["--json", "--batch", "1,3"]).ok()).unwrap();
    let rows = result["tasks"].as_array().unwrap();
    assert_eq!(rows.len(), 2, "one kind at two batch sizes: {result}");
    for row in rows {
        assert!(row["tokens"].as_u64().unwrap() > 30 && row["ratio"].as_f64().unwrap() > 0.0, "{row}");
    }
    let drafted: Value = serde_json::from_str(run(&["--json", "--speculate", "draft=tiny"]).ok()).unwrap();
    assert!(drafted["tasks"][0]["drafted"].is_u64(), "{drafted}");
    assert!(run(&["--speculate", "off"]).usage().contains("names none"));
    let table = run(&["--temperature", "0.7"]).ok().to_owned();
    assert!(table.contains("tokens/step") && table.contains("story"), "{table}");
    std::fs::write(&file, "[[task]]\nkind = 'a'\nname = 'b'\nask = ' '\n").unwrap();
    assert!(run(&[]).usage().contains("a text in `ask`"));
    assert!(home.run(&["bench", "tiny", "--max-tokens", "3"]).usage().contains("--max-tokens applies to"));
}
