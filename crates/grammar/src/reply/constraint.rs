//! The constraint on an answer and its calls, made once for each request.

use std::sync::Arc;

use llguidance::toktrie::TokEnv;
use pellucid_sampling::{TokenConstraint, TokenMatcher};
use pellucid_tokenizer::Tokenizer;

use super::marker::{overshoots, spell};
use super::matcher::ReplyMatcher;
use crate::CompiledGrammar;

/// Rules for an answer and its calls. Parts that are `None` are free or absent.
#[derive(Debug, Clone, Default)]
pub struct ReplyRules {
    /// Text that precedes every answer, such as the heading of harmony's final channel.
    pub answer_open: Option<String>,
    /// Grammar of the answer.
    pub answer: Option<Arc<CompiledGrammar>>,
    /// Calls of tools.
    pub calls: Option<CallRules>,
}

/// Rules for calls.
#[derive(Debug, Clone)]
pub struct CallRules {
    /// Grammar of the calls, the text before the first included.
    pub grammar: Arc<CompiledGrammar>,
    /// Texts of which one begins a call within an answer.
    pub triggers: Vec<String>,
    /// Whether triggers count only at the beginning of the answer.
    pub is_at_start: bool,
    /// Whether the reply must hold a call instead of an answer.
    pub is_required: bool,
}

/// A token that must not follow a part of a trigger, because the grammar behind the trigger does not allow its rest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Forbidden {
    /// Index of the trigger.
    pub(super) trigger: usize,
    /// Bytes of the trigger before the token; `None` if the token holds the whole trigger behind other text.
    pub(super) before: Option<usize>,
    pub(super) token: u32,
}

/// The constraint on an answer and its calls.
#[derive(Clone)]
pub struct ReplyConstraint {
    shared: Arc<Shared>,
}

/// Everything that the replies of one request share.
pub(super) struct Shared {
    pub(super) rules: ReplyRules,
    pub(super) tokenizer: Arc<Tokenizer>,
    pub(super) env: TokEnv,
    pub(super) forbidden: Vec<Forbidden>,
}

impl std::fmt::Debug for ReplyConstraint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("ReplyConstraint").field(&self.shared.rules).finish()
    }
}

impl ReplyRules {
    /// Whether the reply must begin with an answer of a grammar, with a heading, or with a call.
    pub(super) fn is_constrained(&self) -> bool {
        self.answer.is_some() || self.is_call_required() || self.answer_open.is_some()
    }

    pub(super) fn is_call_required(&self) -> bool {
        self.calls.as_ref().is_some_and(|calls| calls.is_required)
    }
}

impl ReplyConstraint {
    /// Prepares the constraint for a model's vocabulary.
    pub(crate) fn new(rules: ReplyRules, tokenizer: Arc<Tokenizer>, env: TokEnv) -> ReplyConstraint {
        let forbidden = match &rules.calls {
            Some(calls) if !calls.is_required => calls.grammar.forbidden_after(&calls.triggers, &tokenizer),
            _ => Vec::new(),
        };
        ReplyConstraint { shared: Arc::new(Shared { rules, tokenizer, env, forbidden }) }
    }
}

impl CompiledGrammar {
    /// Returns the tokens that complete one of the triggers but go on in a way that this grammar does not allow.
    fn forbidden_after(&self, triggers: &[String], tokenizer: &Tokenizer) -> Vec<Forbidden> {
        let trie = self.env.tok_trie();
        let compute = || {
            let mut forbidden = Vec::new();
            for (trigger, text) in triggers.iter().enumerate() {
                let mut matcher = self.grammar_matcher();
                let follows = spell(tokenizer, trie, text).iter().all(|&token| matcher.accept(token).is_ok());
                for found in overshoots(trie, text) {
                    if !follows || !matcher.allows(&trie.greedy_tokenize(&found.rest)) {
                        forbidden.push(Forbidden { trigger, before: found.before, token: found.token });
                    }
                }
            }
            forbidden
        };
        self.forbidden.get_or_init(compute).clone()
    }
}

impl TokenConstraint for ReplyConstraint {
    fn matcher(&self) -> Box<dyn TokenMatcher> {
        Box::new(ReplyMatcher::new(self.shared.clone()))
    }
}
