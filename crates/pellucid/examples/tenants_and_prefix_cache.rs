//! Two tenants with the same long prompt: each finds its own cached prefix and never the other's. A system prompt that
//! was declared shared is found by both.
//!
//! `cargo run -p pellucid --example tenants_and_prefix_cache [MODEL]`

use std::error::Error;

use pellucid::{Error as PellucidError, Pellucid, Request};

/// The tiny model of this crate, which writes stories for small children.
const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/models/tiny.gguf");
/// Long enough to fill several blocks of the cache, which hold 32 tokens each.
const SYSTEM: &str = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park with \
                      her friend Tom. One day, they saw a big red ball in the grass and wanted to play with it.";

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args().nth(1).unwrap_or_else(|| TINY.to_owned());

    println!("Each tenant has its own cache:");
    let model = Pellucid::builder(&path).tenant("alice").tenant("bob").open()?;
    for tenant in ["alice", "alice", "bob", "bob"] {
        ask(&model, tenant)?;
    }

    println!("\nWith a shared system prompt, everyone finds it:");
    let model = Pellucid::builder(&path).tenant("alice").tenant("bob").shared_system(SYSTEM).open()?;
    for tenant in ["alice", "bob"] {
        ask(&model, tenant)?;
    }

    println!("\nA quota bounds what a tenant may hold:");
    let model = Pellucid::builder(&path).tenant_with_quota("carol", 64).open()?;
    match ask(&model, "carol") {
        Err(PellucidError::Rejected(reason)) => println!("  carol: rejected: {reason}"),
        other => other?,
    }
    Ok(())
}

fn ask(model: &Pellucid, tenant: &str) -> Result<(), PellucidError> {
    let request = Request::chat("Then they ran home.").system(SYSTEM).tenant(tenant).max_tokens(16);
    let summary = model.generate(request)?.summary;
    println!("  {tenant}: {} of {} prompt tokens came from the cache", summary.cached_tokens, summary.prompt_tokens);
    Ok(())
}
