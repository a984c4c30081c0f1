//! The shortest program: open a model, ask, print.
//!
//! `cargo run -p pellucid --example hello [MODEL] [PROMPT]`

use pellucid::Pellucid;

/// The tiny model of this crate, which writes stories for small children.
const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/models/tiny.gguf");

fn main() -> Result<(), pellucid::Error> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().unwrap_or_else(|| TINY.to_owned());
    let prompt = arguments.next().unwrap_or_else(|| "Once upon a time, there was a little fox.".to_owned());

    let reply = Pellucid::open(path)?.chat(&prompt)?;

    println!("> {prompt}\n{reply}");
    let summary = &reply.summary;
    println!(
        "\n[{} prompt + {} output tokens in {:?}]",
        summary.prompt_tokens, summary.completion_tokens, summary.total_time
    );
    Ok(())
}
