//! Time of the masks of grammars: `cargo bench -p pellucid-grammar --bench mask -- MODEL.gguf`; without a model, the
//! tiny one. The tokens are sampled at random from the masks, which visits more states than a model does.
#![allow(clippy::print_stdout)]

#[path = "../tests/common/mod.rs"]
mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::Random;
use pellucid_checkpoint::Checkpoint;
use pellucid_grammar::{GrammarCompiler, GrammarSource};
use pellucid_sampling::TokenConstraint;
use pellucid_tokenizer::Tokenizer;
use serde_json::json;

const NUM_REPLIES: u64 = 40;
const MAX_TOKENS: usize = 120;

fn sources() -> Vec<(&'static str, GrammarSource)> {
    let person = json!({
        "type": "object",
        "properties": {
            "name": { "type": "string" }, "age": { "type": "integer", "minimum": 0, "maximum": 150 },
            "email": { "type": "string", "format": "email" }, "born": { "type": "string", "format": "date" },
            "role": { "enum": ["admin", "user", "guest"] },
            "tags": { "type": "array", "items": { "type": "string", "maxLength": 20 }, "maxItems": 5 },
            "address": { "type": "object", "properties": {
                "street": { "type": "string" }, "zip": { "type": "string", "pattern": "^[0-9]{5}$" } },
                "required": ["street", "zip"], "additionalProperties": false }
        },
        "required": ["name", "age", "role", "tags", "address"], "additionalProperties": false
    });
    let tree = json!({ "$ref": "#/$defs/node", "$defs": { "node": { "type": "object", "properties": {
        "value": { "type": "number" }, "children": { "type": "array", "items": { "$ref": "#/$defs/node" } } },
        "required": ["value", "children"], "additionalProperties": false } } });
    let open = json!({ "type": "object", "additionalProperties": { "type": ["string", "number", "null"] } });
    vec![
        ("json_object", GrammarSource::JsonObject),
        ("schema of a person", GrammarSource::JsonSchema(person)),
        ("recursive schema", GrammarSource::JsonSchema(tree)),
        ("open object", GrammarSource::JsonSchema(open)),
        ("regex", GrammarSource::Regex(r"([A-Z][a-z]+ ){1,20}[0-9]{4}-[0-9]{2}".into())),
        (
            "Lark",
            GrammarSource::Grammar("start: term ((\"+\" | \"-\") term)*\nterm: /[0-9]+/ | \"(\" start \")\"".into()),
        ),
    ]
}

fn main() {
    let path = std::env::args().skip(1).find(|argument| !argument.starts_with("--"));
    let tokenizer = match &path {
        Some(path) => Arc::new(Tokenizer::from_checkpoint(&Checkpoint::open(path.as_ref()).unwrap()).unwrap()),
        None => common::TOKENIZER.clone(),
    };
    let vocab_size = tokenizer.vocab_size();
    let begun = Instant::now();
    let compiler = GrammarCompiler::new(tokenizer.clone(), vocab_size).unwrap();
    println!("vocabulary of {vocab_size} tokens prepared in {:?}", begun.elapsed());
    let mut all: Vec<Duration> = Vec::new();
    for (name, source) in sources() {
        let begun = Instant::now();
        let grammar = compiler.compile(&source).unwrap();
        let compiled = begun.elapsed();
        let begun = Instant::now();
        drop(grammar.matcher());
        let cloned = begun.elapsed();
        let mut times: Vec<Duration> = Vec::new();
        let mut words = vec![0; vocab_size.div_ceil(32)];
        for seed in 0..NUM_REPLIES {
            let (mut matcher, mut random) = (grammar.matcher(), Random(seed));
            for _ in 0..MAX_TOKENS {
                if matcher.is_complete() {
                    break;
                }
                let begun = Instant::now();
                matcher.mask(&mut words).unwrap();
                times.push(begun.elapsed());
                let is_allowed = |id: &u32| words[*id as usize / 32] >> (id % 32) & 1 == 1;
                let start = random.below(vocab_size) as u32;
                let ids = (start..vocab_size as u32).chain(0..start);
                let token = ids.clone().find(is_allowed).unwrap();
                if tokenizer.end_ids().contains(&token) {
                    break;
                }
                matcher.accept(token).unwrap();
            }
        }
        println!("{name:20} compile {compiled:>9.1?}, matcher {cloned:>8.1?}, {}", summary(&mut times));
        all.extend(times);
    }
    println!("{:20} {}", "all", summary(&mut all));
}

fn summary(times: &mut [Duration]) -> String {
    times.sort_unstable();
    let mean = times.iter().sum::<Duration>() / times.len().max(1) as u32;
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
    let (half, p99, max) = (at(0.5), at(0.99), at(1.0));
    format!("{} masks: mean {mean:.1?}, median {half:.1?}, p99 {p99:.1?}, max {max:.1?}", times.len())
}
