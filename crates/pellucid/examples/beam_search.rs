//! Searches for the most probable continuation instead of sampling one, and compares it with the greedy one.
//!
//! `cargo run -p pellucid --example beam_search [MODEL]`

use std::error::Error;

use pellucid::{BeamParams, EarlyStopping, Pellucid, Request};

/// The tiny model of this crate, which writes stories for small children.
const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/models/tiny.gguf");

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args().nth(1).unwrap_or_else(|| TINY.to_owned());
    let model = Pellucid::open(path)?;
    let prompt = "The best thing about the park";

    let greedy = model.generate(Request::text(prompt).max_tokens(24).logprobs(0))?;
    let log_probabilities = greedy.choices[0].tokens.iter().filter_map(|token| Some(token.logprobs.as_ref()?.chosen));
    println!("greedy, log probability {:.3}:\n  {prompt}{greedy}\n", log_probabilities.sum::<f32>());

    // A length penalty of 0 makes the score the log probability of the whole text.
    let beams = BeamParams { width: 6, num_returned: 3, length_penalty: 0.0, early_stopping: EarlyStopping::Never };
    let found = model.generate(Request::text(prompt).max_tokens(24).beams(beams))?;
    for (i, choice) in found.choices.iter().enumerate() {
        let score = choice.score.unwrap_or_default();
        println!("beam {}, log probability {score:.3}:\n  {prompt}{}\n", i + 1, choice.text);
    }
    Ok(())
}
