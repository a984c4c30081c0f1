//! A chat in the terminal: reads a line, streams the reply, remembers the conversation; ends at the end of the input.
//!
//! `cargo run -p pellucid --example chat_loop [MODEL]`

use std::error::Error;
use std::io::{BufRead, Write};

use pellucid::{Message, Pellucid, Preset, Request};

/// The tiny model of this crate, which writes stories for small children.
const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/models/tiny.gguf");

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args().nth(1).unwrap_or_else(|| TINY.to_owned());
    let model = Pellucid::open(path)?;
    println!("Chatting with {}. Ctrl-D ends.", model.info().path.display());

    let mut messages: Vec<Message> = Vec::new();
    prompt()?;
    for line in std::io::stdin().lock().lines() {
        messages.push(Message::user(line?));
        // The engine still has the keys and values of the conversation so far: only the new line is computed.
        let request = Request::messages(messages.clone()).preset(Preset::Chat).max_tokens(100);
        let mut stream = model.stream(request)?;
        for piece in &mut stream {
            print!("{}", piece?.text);
            std::io::stdout().flush()?;
        }
        let reply = stream.into_reply()?;
        println!("\n[{} of {} prompt tokens were cached]", reply.summary.cached_tokens, reply.summary.prompt_tokens);
        messages.push(Message::assistant(reply.into_text()));
        prompt()?;
    }
    println!();
    Ok(())
}

fn prompt() -> std::io::Result<()> {
    print!("> ");
    std::io::stdout().flush()
}
