//! Measures the speed of a tokenizer: `cargo run --release -p pellucid-tokenizer --example speed -- MODEL TEXT-FILE
//! [IDS-FILE]`. MODEL is a model file, a model folder or a tokenizer.json. IDS-FILE receives the ids, for comparison.
//! With a tokenizer.json, the `tokenizers` library encodes the same text too. Times are the best of five.

use std::path::Path;
use std::time::Instant;

use pellucid_checkpoint::{Checkpoint, HuggingFace};
use pellucid_tokenizer::Tokenizer;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, model, text, ids_file @ ..] = arguments.as_slice() else {
        return Err("usage: speed MODEL TEXT-FILE [IDS-FILE]".into());
    };
    let start = Instant::now();
    let tokenizer = if model.ends_with(".json") {
        Tokenizer::from_hugging_face(&HuggingFace {
            config: serde_json::Value::Null,
            generation_config: None,
            tokenizer: Some(std::fs::read_to_string(model)?),
            tokenizer_config: None,
            chat_template: None,
            ..HuggingFace::default()
        })?
    } else {
        Tokenizer::from_checkpoint(&Checkpoint::open(Path::new(model))?)?
    };
    let load_ms = start.elapsed().as_secs_f64() * 1e3;
    let text = String::from_utf8_lossy(&std::fs::read(text)?).into_owned();
    let (ids, encode_s) = best_of_five(|| tokenizer.encode(&text));
    let start = Instant::now();
    let decoded = tokenizer.decode(&ids, false);
    let decode_s = start.elapsed().as_secs_f64();
    let megabytes = text.len() as f64 / 1e6;
    println!(
        "load {load_ms:.0} ms; {megabytes:.2} MB, {} ids: encode {encode_s:.3} s ({:.1} MB/s), decode {decode_s:.3} s; \
         same text: {}",
        ids.len(),
        megabytes / encode_s,
        decoded == text
    );
    if model.ends_with(".json") {
        let theirs = tokenizers::Tokenizer::from_file(model).map_err(|error| error.to_string())?;
        let (encoding, their_s) = best_of_five(|| theirs.encode_fast(text.as_str(), false));
        let their_ids = encoding.map_err(|error| error.to_string())?.get_ids().to_vec();
        println!(
            "tokenizers library: encode {their_s:.3} s ({:.1} MB/s), same ids: {}; ours is {:.2} times as fast",
            megabytes / their_s,
            their_ids == ids,
            their_s / encode_s
        );
    }
    if let [file] = ids_file {
        let lines: Vec<String> = ids.iter().map(u32::to_string).collect();
        std::fs::write(file, lines.join("\n"))?;
    }
    Ok(())
}

/// Returns the result and the shortest time in seconds.
fn best_of_five<T>(run: impl Fn() -> T) -> (T, f64) {
    let timed = || {
        let start = Instant::now();
        let result = run();
        (result, start.elapsed().as_secs_f64())
    };
    let mut best = timed();
    for _ in 1..5 {
        let next = timed();
        if next.1 < best.1 {
            best = next;
        }
    }
    best
}
