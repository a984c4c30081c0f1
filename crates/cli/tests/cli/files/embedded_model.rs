//! The model that the program contains: every command works with it, without a network and without Python.

use crate::support::{Home, Ran};

/// Runs a command with `tiny`. Nothing listens at the endpoint of the hub, and there is no python3 on the path.
#[track_caller]
fn offline(home: &Home, args: &[&str]) -> Ran {
    let ran = home.run(args);
    ran.ok();
    ran
}

#[test]
fn every_command_works_with_the_embedded_model() {
    let home = Home::new();
    let text = home.path().join("text.txt");
    let story = "Once upon a time there was a little girl. She loved to play in the park with her friends. ";
    std::fs::write(&text, story.repeat(8)).unwrap();
    let (text, out) = (text.to_str().unwrap().to_owned(), home.path().join("q8.gguf"));
    let out = out.to_str().unwrap();

    let reply = offline(&home, &["run", "--model", "tiny", "--temperature", "0", "-n", "24", "Once upon a time"]);
    assert!(reply.ok().contains("there was a little girl"), "{reply:?}");
    assert!(offline(&home, &["explain", "--model", "tiny", "-n", "1", "Once upon a time"]).ok().contains("token 1"));
    assert!(offline(&home, &["inspect", "tiny"]).ok().contains("stories260K"));
    assert!(offline(&home, &["inspect", "stories260k"]).ok().contains("stories260K"));
    let ids = home.run_with_input(&["tokenize", "tiny"], b"Once upon a time");
    assert!(!ids.ok().is_empty());
    assert!(offline(&home, &["perplexity", "tiny", &text, "--window", "32"]).ok().contains("perplexity"));
    offline(&home, &["bench", "tiny", "--prompt", "8", "--generate", "2", "--repeat", "1"]);
    offline(&home, &["prove", "tiny", "--prompts", "2"]);
    offline(&home, &["quantize", "tiny", out, "--type", "q8_0"]);
    assert!(offline(&home, &["inspect", out]).ok().contains("stories260K"));
    assert!(offline(&home, &["list"]).ok().starts_with("tiny\n"));
}

/// A store that another version or an accident has changed holds the program's own model again after the next use.
#[test]
fn a_changed_copy_is_replaced() {
    let home = Home::new();
    let path = home.model_folder("pellucid/tiny").join("tiny.gguf");
    offline(&home, &["pull", "tiny"]);
    let content = std::fs::read(&path).unwrap();
    let mut changed = content.clone();
    changed[content.len() - 1] ^= 1;
    std::fs::write(&path, changed).unwrap();
    offline(&home, &["inspect", "tiny"]);
    assert_eq!(std::fs::read(&path).unwrap(), content);
    offline(&home, &["rm", "tiny"]);
    assert!(!path.exists());
    offline(&home, &["inspect", "tiny"]);
    assert_eq!(std::fs::read(&path).unwrap(), content);
}

/// Without a network, the error says how to try the program nevertheless.
#[test]
fn the_default_model_names_the_embedded_one_when_it_cannot_be_fetched() {
    let home = Home::new();
    let ran = home.run(&["run", "What is the capital of France?"]);
    for word in ["the model qwen2.5-coder-", "python3 is not installed; install", "apt install", "--model tiny"] {
        assert!(ran.error().contains(word), "{word}: {ran:?}");
    }
    assert!(ran.stderr.contains("to download once, into "), "{ran:?}");
    assert!(home.files().is_empty(), "{:?}", home.files());
}
