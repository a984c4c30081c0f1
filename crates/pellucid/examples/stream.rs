//! Prints a reply while it is generated, and cancels a second one by dropping it.
//!
//! `cargo run -p pellucid --example stream [MODEL]`

use std::error::Error;
use std::io::Write;

use pellucid::{Pellucid, Request};

/// The tiny model of this crate, which writes stories for small children.
const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/models/tiny.gguf");

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args().nth(1).unwrap_or_else(|| TINY.to_owned());
    let model = Pellucid::open(path)?;

    let prompt = "One day, a little bird";
    print!("{prompt}");
    let mut stream = model.stream(Request::text(prompt).temperature(0.7).seed(3).max_tokens(120))?;
    for piece in &mut stream {
        print!("{}", piece?.text);
        std::io::stdout().flush()?;
    }
    let summary = stream.summary();
    let per_token = summary.time_per_output_token.unwrap_or_default();
    println!("\n\n[{} tokens, {per_token:?} each, seed {}]", summary.completion_tokens, stream.seed());

    // A reader that has enough drops the stream, and the engine stops computing for it.
    let start: String = (model.stream(Request::text(prompt).max_tokens(1000))?)
        .take(10)
        .map(|piece| piece.map(|piece| piece.text))
        .collect::<Result<_, _>>()?;
    println!("\n{prompt}{start} ... (cancelled after ten pieces)");
    Ok(())
}
