//! Measures the speed of a tokenizer: `cargo run --release -p pellucid-tokenizer --example speed -- MODEL TEXT-FILE
//! [IDS-FILE]`. MODEL is a model file, a model folder or a tokenizer.json. IDS-FILE receives the ids, for comparison.

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
        })?
    } else {
        Tokenizer::from_checkpoint(&Checkpoint::open(Path::new(model))?)?
    };
    let load_ms = start.elapsed().as_secs_f64() * 1e3;
    let text = String::from_utf8_lossy(&std::fs::read(text)?).into_owned();
    let start = Instant::now();
    let ids = tokenizer.encode(&text);
    let encode_s = start.elapsed().as_secs_f64();
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
    if let [file] = ids_file {
        let lines: Vec<String> = ids.iter().map(u32::to_string).collect();
        std::fs::write(file, lines.join("\n"))?;
    }
    Ok(())
}
