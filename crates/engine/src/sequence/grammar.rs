//! The grammar of one sequence: its matcher, and the mask for the next token.

use pellucid_sampling::{StepKind, TokenMatcher, TokenTrace};

use crate::{Error, Request, fallible};

/// Constrains the tokens of one sequence.
#[derive(Debug)]
pub(crate) struct SequenceGrammar {
    matcher: Box<dyn TokenMatcher>,
    /// One bit for each token of the vocabulary.
    mask: Vec<u32>,
    /// Whether `mask` is that of the next token.
    is_ready: bool,
}

impl SequenceGrammar {
    /// Returns the grammar of a new sequence of `request`; `None` if the request has no constraint.
    pub(crate) fn new(request: &Request, vocab_size: usize) -> Result<Option<SequenceGrammar>, Error> {
        let Some(constraint) = &request.constraint else { return Ok(None) };
        let num_words = vocab_size.div_ceil(32);
        let mut mask = fallible::with_capacity(num_words)?;
        mask.resize(num_words, 0);
        Ok(Some(SequenceGrammar { matcher: constraint.matcher(), mask, is_ready: false }))
    }

    /// Whether every token may come next, so that no mask is needed.
    pub(crate) fn allows_all(&self) -> bool {
        self.matcher.allows_all()
    }

    /// Computes the mask of the next token before it is needed, while the device computes. An error comes up again when
    /// the mask is used.
    pub(crate) fn prepare(&mut self) {
        if !self.allows_all() {
            let _ = self.mask(false);
        }
    }

    /// Returns the mask of the next token; `None` if every token is allowed. A traced token always gets a mask, so that
    /// its trace has the step.
    pub(crate) fn mask(&mut self, is_traced: bool) -> Result<Option<&[u32]>, Error> {
        if self.allows_all() {
            if is_traced {
                self.mask.fill(u32::MAX);
            }
            return Ok(is_traced.then_some(&*self.mask));
        }
        if !self.is_ready {
            self.matcher.mask(&mut self.mask)?;
            self.is_ready = true;
        }
        Ok(Some(&self.mask))
    }

    /// Moves past a token of the reply. Returns whether the reply must end, because nothing can follow.
    pub(crate) fn accept(&mut self, token: u32) -> Result<bool, Error> {
        self.is_ready = false;
        self.matcher.accept(token)?;
        Ok(self.matcher.is_complete())
    }

    /// Returns tokens that must come next, as [`TokenMatcher::forced`] does.
    pub(crate) fn forced(&mut self) -> &[u32] {
        self.matcher.forced()
    }

    /// Whether `token` comes next because no other token can.
    pub(crate) fn forces(&mut self, token: u32) -> bool {
        self.forced().first() == Some(&token)
    }

    /// Adds to the trace of a token what the grammar expected there. Call it before the token is accepted.
    pub(crate) fn describe(&mut self, trace: &mut TokenTrace) {
        if let Some(step) = trace.steps.iter_mut().find(|step| step.kind == StepKind::Mask) {
            let forced = if self.matcher.forced().is_empty() { "" } else { "forced; " };
            step.setting = format!("{forced}{}", self.matcher.expected());
        }
    }
}
