//! `pellucid embed` through the built program, on a tiny encoder and a tiny decoder.

use crate::support::Home;
use crate::support::tiny_model::tiny_model;
use serde_json::Value;

const ENCODER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../selftest/fixtures/encoders/bert");

fn lines(text: &str) -> Vec<Vec<f32>> {
    text.lines().map(|line| line.split(' ').map(|value| value.parse().unwrap()).collect()).collect()
}

#[test]
fn texts_become_vectors_as_numbers_and_as_json() {
    let home = Home::new();
    let ran = home.run(&["embed", ENCODER, "a cat", "the dog"]);
    let printed: Vec<&str> = ran.ok().lines().collect();
    let vectors = lines(ran.ok());
    assert_eq!(vectors.iter().map(Vec::len).collect::<Vec<_>>(), [48, 48]);
    for vector in &vectors {
        assert!((vector.iter().map(|value| value * value).sum::<f32>() - 1.0).abs() < 1e-5);
    }
    // The lines of standard input are texts too, and neither their number nor the threads change a bit.
    let many = "a cat\n".repeat(300) + "the dog\n";
    let input = home.run_with_input(&["embed", ENCODER, "--threads", "1"], many.as_bytes());
    let found: Vec<&str> = input.ok().lines().collect();
    assert_eq!(found.len(), 301);
    assert_eq!([found[0], found[299], found[300]], [printed[0], printed[0], printed[1]]);
    let json: Value = serde_json::from_str(home.run(&["embed", ENCODER, "--json", "a cat"]).ok()).unwrap();
    assert_eq!((&json["index"], &json["tokens"]), (&Value::from(0), &Value::from(6)));
    assert_eq!(json["embedding"].as_array().unwrap().len(), 48);
    let raw = lines(home.run(&["embed", ENCODER, "--no-normalize", "--pooling", "cls", "a cat"]).ok());
    assert!(raw[0].iter().map(|value| value * value).sum::<f32>() > 2.0);
}

#[test]
fn what_a_model_cannot_do_is_refused_by_name() {
    let home = Home::new();
    let tiny = tiny_model(&home, None);
    let long = "a ".repeat(400);
    let cases: [(&[&str], &str); 6] = [
        (&["embed", ENCODER, &long], "text 1 has 402 tokens, but the model's context holds 128; use --truncate"),
        (&["embed", ENCODER, "--dimensions", "7", "a"], "--dimensions 7: expected 48"),
        (&["embed", ENCODER, "--device", "cuda", "a"], "encoders run on the CPU only"),
        (&["embed", ENCODER, "--kv-memory", "1MB", "a"], "--kv-memory has no effect"),
        (&["embed", &tiny, "a"], "choose one of mean, cls, last"),
        (&["run", ENCODER, "a"], "is an encoder: it computes vectors of texts"),
    ];
    for (args, expected) in cases {
        let ran = home.run(args);
        let message = ran.usage();
        assert!(message.contains(expected), "{args:?}: {message}");
    }
    let ran = home.run_with_input(&["embed", ENCODER], b"a cat\r\nthe \xff dog\n");
    assert!(ran.usage().contains("line 2 of standard input is not UTF-8: the byte 0xff at offset 4"), "{ran:?}");
    assert!(home.run(&["embed", &tiny, "--pooling", "last", "--device", "cpu", ""]).usage().contains("has no tokens"));
    assert_eq!(lines(home.run(&["embed", ENCODER, "--truncate", &long]).ok())[0].len(), 48);
    assert!(lines(home.run(&["embed", &tiny, "--pooling", "last", "--device", "cpu", "ab"]).ok())[0].len() > 1);
}
