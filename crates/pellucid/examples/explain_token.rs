//! Shows how one token is chosen: every step of the sampling chain with its candidates, then the draw.
//!
//! `cargo run -p pellucid --example explain_token [MODEL]`

use std::error::Error;

use pellucid::{Pellucid, Request};

/// The tiny model of this crate, which writes stories for small children.
const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/models/tiny.gguf");
/// Candidates to show for each step.
const NUM_SHOWN: usize = 6;

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args().nth(1).unwrap_or_else(|| TINY.to_owned());
    let model = Pellucid::open(path)?;

    let prompt = "Lily was very";
    let request = Request::text(prompt).temperature(0.8).top_k(5).top_p(0.9).seed(11).max_tokens(1).trace();
    let reply = model.generate(request)?;
    let trace = &reply.choices[0].traces[0].token;

    println!("{prompt}...\n");
    for step in &trace.steps {
        println!("{} {}: {} candidates in, {} left", step.name, step.setting, step.entered, step.left);
        for candidate in step.candidates.iter().take(NUM_SHOWN) {
            let text = format!("{:?}", model.token_text(candidate.id));
            let bar = "#".repeat((candidate.after * 40.0).round() as usize);
            let after = if candidate.cut { "   cut".to_owned() } else { format!("{:5.1}%", candidate.after * 100.0) };
            println!("    {text:<12} {:5.1}% -> {after} {bar}", candidate.before * 100.0);
        }
        println!();
    }
    let winner = trace.draw.winner;
    println!(
        "drawn: {:?}, with probability {:.1}% among {} candidates; the model's own probability was {:.1}%",
        model.token_text(winner.id),
        winner.probability * 100.0,
        trace.draw.entrants,
        f64::from(trace.logprob).exp() * 100.0
    );
    println!("seed {}: the same seed draws the same token", reply.seed);
    Ok(())
}
