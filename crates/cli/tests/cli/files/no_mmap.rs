//! `--no-mmap`: the model is read into memory, and compared with the hash that `pull` recorded.

use crate::support::{Home, Reply, Server, sha256};
use serde_json::json;

const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../pellucid/models/tiny.gguf");
const RUN: [&str; 9] = ["run", "--model", "o/r", "--device", "cpu", "-n", "12", "--raw", "Once upon a time"];

/// A home into which the tiny model was pulled.
fn home_with_model() -> Home {
    let content = std::fs::read(TINY).unwrap();
    let entry = json!({ "type": "file", "path": "m.gguf", "size": content.len(), "oid": "pointer",
                        "lfs": { "oid": sha256(&content), "size": content.len(), "pointerSize": 135 } });
    let hub = Server::start(move |request| match request.path.as_str() {
        "/api/models/o/r/tree/main?recursive=true" => Reply::new(200, json!([entry]).to_string()),
        _ => Reply::file(request, &content),
    });
    let home = Home::new();
    home.run_at(&hub, &["pull", "o/r"]).ok();
    home
}

#[test]
fn a_model_in_memory_is_compared_with_its_recorded_hash() {
    let home = home_with_model();
    let mapped = home.run(&RUN);
    let in_memory = home.run(&[&RUN[..], &["--no-mmap"]].concat());
    assert_eq!(in_memory.ok(), mapped.ok());
    assert!(in_memory.stderr.contains("(as recorded)"), "{in_memory:?}");

    // A change that keeps the size, in the last tensor: the model still opens.
    let path = home.model_folder("o/r").join("m.gguf");
    let mut content = std::fs::read(&path).unwrap();
    let last = content.len() - 1;
    content[last] ^= 1;
    std::fs::write(&path, &content).unwrap();
    let refused = home.run(&[&RUN[..], &["--no-mmap"]].concat());
    assert!(refused.error().contains("the file has changed: expected the sha256"), "{refused:?}");
    // Positive control: a mapped file is not hashed.
    home.run(&RUN).ok();
}

#[test]
fn the_hash_of_another_file_is_shown() {
    let home = Home::new();
    let text = home.path().join("text.txt");
    std::fs::write(&text, "Once upon a time there was a little girl. ".repeat(4)).unwrap();
    let args = ["perplexity", TINY, text.to_str().unwrap(), "--no-mmap", "--device", "cpu", "--window", "8"];
    let ran = home.run(&args);
    ran.ok();
    assert!(ran.stderr.contains(&sha256(&std::fs::read(TINY).unwrap())), "{ran:?}");
    assert!(ran.stderr.contains("not compared"), "{ran:?}");
}
