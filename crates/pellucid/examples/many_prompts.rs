//! Answers many prompts in one batch, compares the time with one after the other, and checks that no reply differs.
//!
//! `cargo run -p pellucid --example many_prompts [MODEL]`

use std::error::Error;
use std::time::Instant;

use pellucid::{Pellucid, Request};

/// The tiny model of this crate, which writes stories for small children.
const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/models/tiny.gguf");

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args().nth(1).unwrap_or_else(|| TINY.to_owned());
    let model = Pellucid::builder(path).max_sequences(16).open()?;

    let animals = ["cat", "dog", "bird", "fish", "bear", "frog", "duck", "mouse"];
    let requests = || animals.map(|animal| Request::text(format!("The little {animal}")).max_tokens(24));

    let start = Instant::now();
    let together = model.generate_all(requests())?;
    let batch_time = start.elapsed();

    let start = Instant::now();
    let alone = requests().into_iter().map(|request| model.generate(request)).collect::<Result<Vec<_>, _>>()?;
    let single_time = start.elapsed();

    for (animal, reply) in animals.iter().zip(&together) {
        println!("The little {animal}{}\n", reply.text().trim_end());
    }
    let same = together.iter().zip(&alone).all(|(batch, single)| batch.text() == single.text());
    println!("{} prompts: {batch_time:?} together, {single_time:?} one after the other", animals.len());
    println!("same replies: {same}");
    Ok(())
}
