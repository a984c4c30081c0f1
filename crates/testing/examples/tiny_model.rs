//! Writes the tiny model, for tests in other languages: `tiny_model FOLDER [CONTEXT] [words] [brackets]`.

use std::path::Path;

use pellucid_testing::{TINY_TEMPLATE, TinyModel};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let Some((folder, rest)) = arguments.split_first() else {
        eprintln!("usage: tiny_model FOLDER [CONTEXT] [words] [brackets]");
        std::process::exit(2);
    };
    let context_len = rest.iter().find_map(|word| word.parse().ok());
    let has = |name: &str| rest.iter().any(|word| word == name);
    let model = TinyModel {
        template: Some(TINY_TEMPLATE),
        context_len,
        has_words: has("words"),
        has_brackets: has("brackets"),
        fills_gaps: false,
    };
    if let Err(error) = model.write(Path::new(folder)) {
        eprintln!("error: could not write the model to {folder}: {error}");
        std::process::exit(1);
    }
}
