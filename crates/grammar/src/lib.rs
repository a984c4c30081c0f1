//! Structured output: compiles a JSON schema, a regular expression or a grammar into a mask over the tokens of a model.
//!
//! The server and the command line compile a [`GrammarSource`] with the [`GrammarCompiler`] of the loaded model, on the
//! thread of the request. The result is a [`pellucid_sampling::TokenConstraint`], which the engine asks for a mask
//! before it samples. The parser is the `llguidance` crate; this crate gives it the bytes of the model's tokens,
//! refuses what it would not enforce, and bounds its work by counts instead of time, so that one source always has the
//! same result.
//!
//! Read `compiler.rs` first. `schema/` checks JSON schemas, `gbnf/` translates grammars of llama.cpp, `cache.rs` keeps
//! compiled grammars by tenant, `reply/` is the grammar of a whole reply with thoughts and calls of tools.
#![forbid(unsafe_code)]
#![warn(clippy::print_stdout, clippy::print_stderr)]

mod cache;
mod compile_calls;
mod compiler;
mod error;
mod expected;
mod finite;
mod gbnf;
mod lark;
mod matcher;
mod reply;
mod schema;
mod source;
mod spelling;
mod vocabulary;

pub use cache::{GrammarCache, MAX_CACHED, MAX_CACHED_TENANTS};
pub use compiler::{CompiledGrammar, GrammarCompiler};
pub use error::Error;
pub use reply::{
    ArgumentSyntax, CallFormat, CallRules, CallSource, CallTool, FORMATS, IdSyntax, NotEnforced, Parameter, Piece,
    ReplyConstraint, ReplyRules, SimpleTypes, ValueKind,
};
pub use source::{GrammarSource, MAX_CHOICES, MAX_SOURCE_BYTES};
