//! The grammars of a loaded model: the compiler for its vocabulary, made on first use, and what tenants compiled.

use std::sync::{Arc, OnceLock};

use pellucid_engine::TenantId;
use pellucid_grammar::{CompiledGrammar, Error, GrammarCache, GrammarCompiler, GrammarSource};
use pellucid_tokenizer::Tokenizer;

/// Compiles grammars for one model and keeps them by tenant.
#[derive(Debug, Default)]
pub struct Grammars {
    compiler: OnceLock<Result<GrammarCompiler, Error>>,
    cache: GrammarCache<TenantId>,
}

impl Grammars {
    pub(crate) fn get(
        &self,
        tenant: TenantId,
        source: GrammarSource,
        tokenizer: &Arc<Tokenizer>,
        vocab_size: usize,
    ) -> Result<Arc<CompiledGrammar>, Error> {
        self.cache.get(tenant, source, self.compiler(tokenizer, vocab_size)?)
    }

    pub(crate) fn compiler(&self, tokenizer: &Arc<Tokenizer>, vocab_size: usize) -> Result<&GrammarCompiler, Error> {
        let compiler = self.compiler.get_or_init(|| GrammarCompiler::new(tokenizer.clone(), vocab_size));
        compiler.as_ref().map_err(Error::clone)
    }
}
