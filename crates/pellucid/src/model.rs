//! A model that is open.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use pellucid_engine::EngineStats;
use pellucid_generate::LoadedModel;
use pellucid_sampling::{Fallback, GivenOptions, SamplingParams};

use crate::{AsyncReplyStream, Builder, Error, Loaded, ModelInfo, Reply, ReplyStream, Request, generate_all};

/// A model that is open: weights on a device, behind an engine that serves many requests at once.
///
/// Cloning is cheap, and all clones share the engine; it stops when the last clone and the last reply are dropped.
#[derive(Clone)]
pub struct Pellucid {
    pub(crate) loaded: Arc<Loaded>,
}

impl Pellucid {
    /// Opens a GGUF file or a Hugging Face folder with default options: the first usable GPU, else the CPU.
    pub fn open(path: impl AsRef<Path>) -> Result<Pellucid, Error> {
        Pellucid::builder(path).open()
    }

    /// Returns a builder for a GGUF file or a Hugging Face folder.
    pub fn builder(path: impl AsRef<Path>) -> Builder {
        Builder::new(path)
    }

    /// Answers one message of a user; short for [`generate`](Pellucid::generate) with [`Request::chat`].
    ///
    /// ```
    /// # fn main() -> Result<(), pellucid::Error> {
    /// let reply = pellucid::Pellucid::open("models/tiny.gguf")?.chat("Once upon a time")?;
    /// println!("{reply}");
    /// # Ok(())
    /// # }
    /// ```
    pub fn chat(&self, text: impl Into<String>) -> Result<Reply, Error> {
        self.generate(Request::chat(text))
    }

    /// Continues a text; short for [`generate`](Pellucid::generate) with [`Request::text`].
    pub fn complete(&self, text: impl Into<String>) -> Result<Reply, Error> {
        self.generate(Request::text(text))
    }

    /// Answers a request and blocks until the reply is complete.
    pub fn generate(&self, request: impl Into<Request>) -> Result<Reply, Error> {
        self.stream(request)?.into_reply()
    }

    /// Answers a request in an async task of any runtime.
    pub async fn generate_async(&self, request: impl Into<Request>) -> Result<Reply, Error> {
        self.stream_async(request)?.into_reply().await
    }

    /// Answers many requests at once and returns the replies in their order. The first error cancels the rest.
    ///
    /// Each reply is the one that its request would get alone, to the bit.
    ///
    /// ```
    /// # fn main() -> Result<(), pellucid::Error> {
    /// # let model = pellucid::Pellucid::open("models/tiny.gguf")?;
    /// let replies = model.generate_all(["Lily went", "Tom saw a big dog", "The sun"])?;
    /// assert_eq!(replies.len(), 3);
    /// # Ok(())
    /// # }
    /// ```
    pub fn generate_all<R: Into<Request>>(&self, requests: impl IntoIterator<Item = R>) -> Result<Vec<Reply>, Error> {
        generate_all::generate_all(self, requests.into_iter().map(Into::into).collect())
    }

    /// Answers a request piece by piece; the iterator blocks until the next piece is there.
    ///
    /// This call encodes the prompt and never waits for the engine: a full queue is an error.
    pub fn stream(&self, request: impl Into<Request>) -> Result<ReplyStream, Error> {
        ReplyStream::submit(self, request.into())
    }

    /// Answers a request piece by piece in an async task of any runtime.
    pub fn stream_async(&self, request: impl Into<Request>) -> Result<AsyncReplyStream, Error> {
        Ok(self.stream(request)?.into_async())
    }

    /// Returns the maximum tokens of a prompt and its reply together.
    pub fn context_len(&self) -> usize {
        self.model().context_len
    }

    /// Whether the model has a usable chat template. Without one, only [`Request::text`] works.
    pub fn can_chat(&self) -> bool {
        self.model().template.is_some()
    }

    /// Returns facts about the model, its device and its memory.
    pub fn info(&self) -> &ModelInfo {
        &self.loaded.info
    }

    /// Returns the engine's counters; waits for the step that is being computed.
    pub fn stats(&self) -> Result<EngineStats, Error> {
        self.model().engine.stats().map_err(Error::Failed)
    }

    /// Returns the sampling parameters that `pellucid run` uses with this model: those that its files recommend
    /// (`generation_config.json`, `general.sampling.*` of a GGUF file), or else Pellucid's default,
    /// [`PELLUCID_DEFAULT`](crate::PELLUCID_DEFAULT).
    ///
    /// A [`Request`](crate::Request) without sampling options is greedy; this makes one that is answered like the
    /// command line does:
    ///
    /// ```
    /// use pellucid::{Pellucid, Request};
    ///
    /// # fn main() -> Result<(), pellucid::Error> {
    /// let model = Pellucid::open("models/tiny.gguf")?;
    /// let request = Request::text("Once upon a time")
    ///     .sampling(|params| *params = model.default_sampling())
    ///     .top_p(0.8) // An option that is set afterwards takes precedence.
    ///     .seed(0)
    ///     .max_tokens(20);
    /// println!("{}", model.generate(request)?.text());
    /// # Ok(())
    /// # }
    /// ```
    pub fn default_sampling(&self) -> SamplingParams {
        let options = self.model().sampling.resolve(&GivenOptions::default(), Fallback::Pellucid);
        options.apply(SamplingParams::default(), |text| self.model().tokenizer.encode_within(text))
    }

    /// Returns the tokens of a text, without the ids that a model expects before every text.
    pub fn tokenize(&self, text: &str) -> Vec<u32> {
        self.model().tokenizer.encode(text)
    }

    /// Returns the text of tokens; control tokens have none.
    pub fn detokenize(&self, ids: &[u32]) -> String {
        self.model().tokenizer.decode(ids, true)
    }

    /// Returns the text of one token as it stands within a text, where it may begin with a space.
    ///
    /// Bytes that are a part of a character become U+FFFD; an id outside the vocabulary has no text.
    pub fn token_text(&self, id: u32) -> String {
        let token = self.model().tokenizer.token(id);
        token.map_or_else(String::new, |token| String::from_utf8_lossy(&token.bytes).into_owned())
    }

    /// Returns the model as [`pellucid_generate`] uses it.
    pub fn model(&self) -> &LoadedModel {
        &self.loaded.model
    }
}

impl From<Loaded> for Pellucid {
    fn from(loaded: Loaded) -> Pellucid {
        Pellucid { loaded: Arc::new(loaded) }
    }
}

impl fmt::Debug for Pellucid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ModelInfo { path, device, .. } = self.info();
        f.debug_struct("Pellucid").field("path", path).field("device", device).finish_non_exhaustive()
    }
}
