//! The thoughts of a loaded model: their format, the settings of its template, and what both make of a prompt.

use std::sync::{Arc, OnceLock};

use crate::{
    LoadedModel, MarkerTokens, PromptRequest, ReplySplitter, ThinkingSettings, ThoughtConstraint, ThoughtMarkers,
};

/// The thoughts of one model, read from its chat template and vocabulary on first use.
#[derive(Debug)]
pub struct Thinking {
    /// Markers of the thoughts; `None` for a model that writes none.
    pub markers: Option<ThoughtMarkers>,
    /// Variables of the template that set them.
    pub settings: ThinkingSettings,
    tokens: OnceLock<Arc<MarkerTokens>>,
    /// Tokens of the markers in replies that may call tools, where they differ.
    tokens_before_calls: OnceLock<Arc<MarkerTokens>>,
}

impl Thinking {
    fn of(model: &LoadedModel) -> Thinking {
        let template = model.template.as_ref();
        Thinking {
            // A model without a template does not chat, so its replies have no parts.
            markers: template.and_then(|template| ThoughtMarkers::of(Some(template), &model.tokenizer)),
            settings: template.map(ThinkingSettings::of).unwrap_or_default(),
            tokens: OnceLock::new(),
            tokens_before_calls: OnceLock::new(),
        }
    }
}

impl LoadedModel {
    /// Returns what is known of the model's thoughts.
    pub fn thinking(&self) -> &Thinking {
        self.thinking.get_or_init(|| Thinking::of(self))
    }

    /// Makes the replies to a chat prompt separate thoughts from the answer, applies the request's constraint to the
    /// answer alone, and ends thoughts that have `budget` tokens. `ending` is the end of the prompt's text, as
    /// [`EncodedChat`](crate::EncodedChat) has it. Changes nothing for a model without thoughts.
    pub fn separate_thoughts(&self, prompt: &mut PromptRequest, ending: &str, budget: Option<usize>) {
        let Thinking { markers: Some(markers), .. } = self.thinking() else { return };
        // If calls have headings of their own, the reply plan decides which heading follows the thoughts.
        let has_calls = prompt.splitter.as_ref().is_some_and(ReplySplitter::has_calls);
        let is_headed = has_calls && self.calling().answer_open().is_some();
        let markers = &if is_headed { markers.without_headings() } else { markers.clone() };
        let is_open = markers.is_opened_by(ending);
        prompt.splitter = Some(prompt.splitter.take().unwrap_or_default().with_thoughts(markers.clone(), is_open));
        let answer = prompt.request.constraint.take();
        prompt.request.constraint = match answer {
            // The prompt has ended the thoughts, so the reply is the answer.
            answer if markers.is_closed_by(ending) => answer,
            None if budget.is_none() => None,
            answer => {
                let thinking = self.thinking();
                let cache = if is_headed { &thinking.tokens_before_calls } else { &thinking.tokens };
                let find = || Arc::new(MarkerTokens::new(markers.clone(), self.tokenizer.clone(), self.vocab_size));
                let tokens = cache.get_or_init(find).clone();
                Some(Arc::new(ThoughtConstraint { tokens, is_open, budget, answer }))
            }
        };
    }
}
