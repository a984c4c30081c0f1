//! A request: a prompt and how to answer it.

mod message;

use std::time::Duration;

use pellucid_engine::{BeamParams, EarlyStopping, Scope, TenantId};
use pellucid_generate::{
    ChatPrompt, EncodedChat, LoadedModel, PromptRequest, REASONING_EFFORTS, ReplyPlan, ThinkingError, Tool, ToolChoice,
    ToolRules, Turn,
};
use pellucid_sampling::{DRY_BREAKERS, Preset, SamplingParams, random_seed};
use pellucid_tokenizer::message;
use serde_json::{Map, Value};

use crate::Error;

pub use message::Message;

#[derive(Debug, Clone)]
enum Prompt {
    Chat(Vec<Message>),
    Text(String),
}

/// A prompt and how to answer it. A plain string is a chat with one message of the user.
///
/// Without sampling options a reply is greedy: each token is the most probable one, so the reply is always the same.
/// A sampling option (`seed`, `top_k`, `top_p`, `min_p`, several choices) turns sampling on, at temperature 1 unless
/// `temperature` says otherwise.
///
/// ```
/// use pellucid::{Pellucid, Request};
///
/// # fn main() -> Result<(), pellucid::Error> {
/// let model = Pellucid::open("models/tiny.gguf")?;
/// let request = Request::text("Once upon a time").temperature(0.8).seed(7).max_tokens(20);
/// let reply = model.generate(request.clone())?;
/// assert_eq!(model.generate(request)?.text(), reply.text());
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
#[must_use = "a request does nothing until a model answers it"]
pub struct Request {
    prompt: Prompt,
    system: Option<String>,
    tools: Vec<Tool>,
    tool_choice: ToolChoice,
    parallel_calls: bool,
    sampling: SamplingParams,
    /// Whether `sampling.temperature` was set; otherwise `is_sampled` decides it.
    has_temperature: bool,
    is_sampled: bool,
    seed: Option<u64>,
    max_tokens: Option<usize>,
    stops: Vec<String>,
    num_choices: usize,
    best_of: Option<usize>,
    beams: Option<BeamParams>,
    loop_guard: bool,
    trace: bool,
    speculate: bool,
    prediction: Option<String>,
    reasoning_effort: Option<String>,
    thinking_budget: Option<usize>,
    tenant: Option<String>,
    priority: i32,
    timeout: Option<Duration>,
}

/// A request that was checked and encoded for one model.
pub(crate) struct EncodedRequest {
    pub(crate) prompt: PromptRequest,
    pub(crate) stops: Vec<String>,
    /// Parts of the tools' schemas that calls need not satisfy.
    pub(crate) not_enforced: Vec<String>,
}

impl Request {
    /// Returns a chat with one message of the user.
    pub fn chat(text: impl Into<String>) -> Request {
        Request::messages([Message::user(text)])
    }

    /// Returns a conversation for the model's chat template.
    pub fn messages(messages: impl IntoIterator<Item = Message>) -> Request {
        Request::new(Prompt::Chat(messages.into_iter().collect()))
    }

    /// Returns text for the model to continue, without a chat template.
    pub fn text(text: impl Into<String>) -> Request {
        Request::new(Prompt::Text(text.into()))
    }

    fn new(prompt: Prompt) -> Request {
        Request {
            prompt,
            system: None,
            tools: Vec::new(),
            tool_choice: ToolChoice::Auto,
            parallel_calls: true,
            sampling: SamplingParams::default(),
            has_temperature: false,
            is_sampled: false,
            seed: None,
            max_tokens: None,
            stops: Vec::new(),
            num_choices: 1,
            best_of: None,
            beams: None,
            loop_guard: false,
            trace: false,
            speculate: true,
            prediction: None,
            reasoning_effort: None,
            thinking_budget: None,
            tenant: None,
            priority: 0,
            timeout: None,
        }
    }

    /// Sets the instructions that come before the conversation. Rejected for a text prompt.
    pub fn system(mut self, text: impl Into<String>) -> Request {
        self.system = Some(text.into());
        self
    }

    /// Offers tools to the model. It calls them in the format of its chat template;
    /// [`Reply::calls`](crate::Reply::calls) returns the calls, whose arguments always satisfy the schemas.
    /// Rejected for a text prompt and by beam search.
    ///
    /// ```
    /// use pellucid::{Message, Pellucid, Request, Tool, ToolChoice};
    /// use serde_json::json;
    ///
    /// # fn main() -> Result<(), pellucid::Error> {
    /// let model = Pellucid::open("models/tiny.gguf")?;
    /// let dice = Tool::new("roll_dice", "Rolls dice.", json!({
    ///     "type": "object",
    ///     "properties": { "sides": { "type": "integer", "minimum": 2, "maximum": 20 } },
    ///     "required": ["sides"],
    ///     "additionalProperties": false,
    /// }));
    /// // The tiny model writes stories, so it is told to call the tool.
    /// let request = Request::chat("Roll the dice.").tools([dice]).tool_choice(ToolChoice::Required);
    /// let request = request.parallel_calls(false);
    /// let reply = model.generate(request.max_tokens(200))?;
    /// assert!((2..=20).contains(&reply.calls()[0].arguments["sides"].as_i64().unwrap()));
    ///
    /// let result = Message::result(&reply.calls()[0], "4");
    /// let messages = [Message::user("Roll the dice."), Message::from(&reply), result];
    /// println!("{}", model.generate(Request::messages(messages).max_tokens(20))?);
    /// # Ok(())
    /// # }
    /// ```
    pub fn tools(mut self, tools: impl IntoIterator<Item = Tool>) -> Request {
        self.tools = tools.into_iter().collect();
        self
    }

    /// Sets whether the model may or must call tools, and which. Default: [`ToolChoice::Auto`].
    pub fn tool_choice(mut self, choice: ToolChoice) -> Request {
        self.tool_choice = choice;
        self
    }

    /// Sets whether one reply may call several tools. Default: true.
    pub fn parallel_calls(mut self, parallel_calls: bool) -> Request {
        self.parallel_calls = parallel_calls;
        self
    }

    /// Sets the maximum tokens of the reply. Default: until the context is full.
    pub fn max_tokens(mut self, num_tokens: usize) -> Request {
        self.max_tokens = Some(num_tokens);
        self
    }

    /// Sets the minimum tokens of the reply: it neither ends nor stops at a stop string before.
    pub fn min_tokens(mut self, num_tokens: u32) -> Request {
        self.sampling.min_tokens = num_tokens;
        self
    }

    /// Ends the reply before this text. May be called again for further texts.
    pub fn stop(mut self, text: impl Into<String>) -> Request {
        self.stops.push(text.into());
        self
    }

    /// Divides the logits by `temperature`. 0 is greedy, 1 is the model's own distribution.
    pub fn temperature(mut self, temperature: f32) -> Request {
        self.sampling.temperature = temperature;
        self.has_temperature = true;
        self
    }

    /// Sets the seed of the random draw: the same seed gives the same reply. Default: random, reported by the reply.
    pub fn seed(mut self, seed: u64) -> Request {
        self.seed = Some(seed);
        self.is_sampled = true;
        self
    }

    /// Samples among the `k` most probable tokens. 0 is no limit.
    pub fn top_k(mut self, k: u32) -> Request {
        self.sampling.top_k = k;
        self.is_sampled = true;
        self
    }

    /// Samples among the most probable tokens that together reach the probability `p`. 1 is no limit.
    pub fn top_p(mut self, p: f32) -> Request {
        self.sampling.top_p = p;
        self.is_sampled = true;
        self
    }

    /// Samples among the tokens that are at least `p` times as probable as the most probable one. 0 is no limit.
    pub fn min_p(mut self, p: f32) -> Request {
        self.sampling.min_p = p;
        self.is_sampled = true;
        self
    }

    /// Replaces the sampling parameters by those of a preset, such as [`Preset::Creative`]. `min_tokens` and `logprobs`
    /// stay as they are.
    pub fn preset(self, preset: Preset) -> Request {
        self.sampling(|params| {
            let SamplingParams { min_tokens, logprobs, .. } = *params;
            *params = SamplingParams { min_tokens, logprobs, ..preset.params() };
        })
    }

    /// Changes any sampling parameter: penalties, DRY, Mirostat, logit bias, the order of the steps.
    ///
    /// The temperature is then the one in `params`, which is 1 unless it was set before. The fields `seed` and
    /// `end_ids` have no effect here: [`Request::seed`] and the model set them.
    ///
    /// ```
    /// # use pellucid::Request;
    /// let request = Request::chat("Tell me a story.").sampling(|params| {
    ///     params.temperature = 0.8;
    ///     params.repetition_penalty = 1.1;
    /// });
    /// ```
    pub fn sampling(mut self, change: impl FnOnce(&mut SamplingParams)) -> Request {
        change(&mut self.sampling);
        self.has_temperature = true;
        self.is_sampled = true;
        self
    }

    /// Sets the number of replies. The first is sampled with the seed, the second with the seed plus 1, and so on.
    pub fn choices(mut self, num_choices: usize) -> Request {
        self.num_choices = num_choices;
        self
    }

    /// Sets the number of replies to make, of which the most probable `choices` are returned.
    pub fn best_of(mut self, num_replies: usize) -> Request {
        self.best_of = Some(num_replies);
        self
    }

    /// Searches with `width` beams instead of sampling and returns the best one.
    pub fn beam_search(self, width: usize) -> Request {
        let early_stopping = EarlyStopping::Heuristic;
        self.beams(BeamParams { width, num_returned: 1, length_penalty: 1.0, early_stopping })
    }

    /// Searches with beams instead of sampling.
    pub fn beams(mut self, beams: BeamParams) -> Request {
        self.beams = Some(beams);
        self
    }

    /// Reports the log probability of each token, and of the `num_tokens` most probable ones, at most 20.
    pub fn logprobs(mut self, num_tokens: u32) -> Request {
        self.sampling.logprobs = Some(num_tokens);
        self
    }

    /// Ends a reply that repeats itself, with [`Finish::Repetition`](crate::Finish::Repetition), but not before
    /// `min_tokens`: as soon as its last 256 + 2p tokens repeat a passage of p tokens, up to 512. Rejected by beam
    /// search.
    pub fn loop_guard(mut self) -> Request {
        self.loop_guard = true;
        self
    }

    /// Sets whether the model's drafters propose tokens. Default: true. The reply is the same without them.
    pub fn speculate(mut self, speculate: bool) -> Request {
        self.speculate = speculate;
        self
    }

    /// Sets a text that the reply is expected to contain, such as a file that is to be edited. A drafter proposes from
    /// it, also where the model has no other drafters; the reply is the same without it. Rejected if `speculate` is
    /// false.
    pub fn prediction(mut self, text: impl Into<String>) -> Request {
        self.prediction = Some(text.into());
        self
    }

    /// Sets how much the model thinks before it answers: `none`, `minimal`, `low`, `medium`, `high`, `xhigh` or `max`.
    /// Rejected if the model's chat template has no such setting.
    pub fn reasoning_effort(mut self, level: impl Into<String>) -> Request {
        self.reasoning_effort = Some(level.into());
        self
    }

    /// Ends thoughts that have `num_tokens` tokens, so that the model answers. Rejected if the model's chat template
    /// has no thoughts, and by beam search.
    pub fn thinking_budget(mut self, num_tokens: usize) -> Request {
        self.thinking_budget = Some(num_tokens);
        self
    }

    /// Records how each token was chosen: every sampling step with its candidates, the draw, and the proposal of a
    /// drafter.
    pub fn trace(mut self) -> Request {
        self.trace = true;
        self
    }

    /// Makes the request one of a tenant that the builder declared. Default: the tenant without a name.
    pub fn tenant(mut self, name: impl Into<String>) -> Request {
        self.tenant = Some(name.into());
        self
    }

    /// Sets the priority among the waiting requests of the same tenant: higher ones start first. Default: 0.
    pub fn priority(mut self, priority: i32) -> Request {
        self.priority = priority;
        self
    }

    /// Ends the reply where it is when this time has passed since submission.
    pub fn timeout(mut self, timeout: Duration) -> Request {
        self.timeout = Some(timeout);
        self
    }

    /// Checks what the engine cannot see, renders the chat template and encodes the prompt.
    pub(crate) fn encode(self, model: &LoadedModel, tenants: &[String]) -> Result<EncodedRequest, Error> {
        let tenant = match &self.tenant {
            None => TenantId(0),
            Some(name) => match tenants.iter().position(|tenant| tenant == name) {
                Some(index) => TenantId(index as u32 + 1),
                None => return Err(Error::UnknownTenant { name: name.clone() }),
            },
        };
        if self.stops.iter().any(String::is_empty) {
            return Err(option("stop", "a text that is not empty", "\"\""));
        }
        if self.prediction.is_some() && !self.speculate {
            return Err(option("prediction", "none with speculate(false)", "a prediction"));
        }
        let prediction = self.prediction.as_deref().map_or_else(Vec::new, |text| model.tokenizer.encode(text));
        let plan = self.plan(model, tenant)?;
        let (EncodedChat { ids: prompt, ending }, turns) = self.prompt_ids(model, &plan)?;
        let best_of = self.best_of.unwrap_or(self.num_choices);
        let request = pellucid_engine::Request {
            scope: Scope::of(tenant),
            max_tokens: self.max_tokens,
            num_choices: self.num_choices,
            best_of,
            beams: self.beams,
            loop_guard: self.loop_guard,
            trace: self.trace,
            speculate: self.speculate,
            prediction,
            priority: self.priority,
            deadline: self.timeout,
            ..pellucid_engine::Request::new(prompt, self.sampling_params(model, best_of))
        };
        let continues_text = matches!(self.prompt, Prompt::Text(_));
        let mut prompt = PromptRequest { continues_text, turns, ..PromptRequest::chat(request) };
        plan.apply(&mut prompt);
        if !continues_text {
            model.separate_thoughts(&mut prompt, &ending, self.thinking_budget);
        }
        Ok(EncodedRequest { prompt, stops: self.stops, not_enforced: plan.not_enforced().to_vec() })
    }

    /// Returns the variables of the template that set how much the model thinks.
    fn thinking_variables(&self, model: &LoadedModel) -> Result<Map<String, Value>, Error> {
        let thinking = model.thinking();
        let mut variables = match self.reasoning_effort.as_deref() {
            None => Map::new(),
            Some(level) if !REASONING_EFFORTS.contains(&level) => {
                return Err(option("reasoning_effort", &format!("one of {}", REASONING_EFFORTS.join(", ")), level));
            }
            Some(level) => {
                let refused = |error: ThinkingError| option("reasoning_effort", &format!("none: {error}"), level);
                thinking.settings.variables(level).map_err(refused)?
            }
        };
        if let Some(budget) = self.thinking_budget {
            if thinking.markers.is_none() || self.beams.is_some() {
                return Err(option("thinking_budget", "a model with thoughts, and no beam search", "a budget"));
            }
            variables.extend(thinking.settings.budget_variables(budget));
        }
        Ok(variables)
    }

    /// Returns the plan of a reply that may call tools.
    fn plan(&self, model: &LoadedModel, tenant: TenantId) -> Result<ReplyPlan, Error> {
        let rules = ToolRules::new(self.tools.clone(), self.tool_choice.clone(), self.parallel_calls);
        let rules = rules.map_err(Error::Tools)?;
        if rules.callable().is_empty() {
            return Ok(ReplyPlan::default());
        }
        match (&self.prompt, &self.beams) {
            (Prompt::Text(_), _) => Err(option("tools", "a chat: text has no place for tools", "a text prompt")),
            (_, Some(_)) => Err(option("tools", "none with beam search", "tools")),
            _ => model.plan_reply(tenant, &rules, None).map_err(Error::Grammar),
        }
    }

    /// Returns the ids of the prompt, and the messages of a chat, for guards.
    fn prompt_ids(&self, model: &LoadedModel, plan: &ReplyPlan) -> Result<(EncodedChat, Vec<Turn>), Error> {
        // A text that cannot fit is refused before it is encoded.
        let prompts = model.prompts().within(model.context_len);
        let messages = match &self.prompt {
            Prompt::Text(_) if self.system.is_some() => {
                return Err(option("system", "a chat: text has no place for instructions", "a text prompt"));
            }
            Prompt::Text(_) if self.reasoning_effort.is_some() || self.thinking_budget.is_some() => {
                return Err(option(
                    "thinking_budget, reasoning_effort",
                    "a chat: text has no thoughts",
                    "a text prompt",
                ));
            }
            Prompt::Text(text) => {
                let ids = prompts.encode_text(text).map_err(Error::Prompt)?;
                return Ok((EncodedChat { ids, ending: String::new() }, Vec::new()));
            }
            Prompt::Chat(messages) => messages,
        };
        if let Some(reason) = &model.template_error {
            return Err(Error::Template { reason: reason.clone() });
        }
        let system = self.system.as_ref().map(|text| message("system", text));
        let messages = messages.iter().map(Message::to_value);
        let messages: Vec<Value> = system.into_iter().chain(messages).collect();
        let variables = self.thinking_variables(model)?;
        let prompt = ChatPrompt { variables: Some(&variables), tools: plan.tools(), ..ChatPrompt::new(&messages) };
        Ok((prompts.encode_with_ending(&prompt).map_err(Error::Prompt)?, Turn::of_messages(&messages)))
    }

    fn sampling_params(&self, model: &LoadedModel, best_of: usize) -> SamplingParams {
        let mut params = self.sampling.clone();
        let has_several = best_of.max(self.num_choices) > 1 || self.beams.is_some();
        if !self.has_temperature {
            params.temperature = if self.is_sampled || has_several { 1.0 } else { 0.0 };
        }
        params.seed = self.seed.unwrap_or_else(random_seed);
        params.end_ids = model.tokenizer.end_ids().to_vec();
        if params.dry_multiplier > 0.0 && params.dry_sequence_breakers.is_empty() {
            let encode = |text: &&str| model.tokenizer.encode_within(text);
            params.dry_sequence_breakers = DRY_BREAKERS.iter().map(encode).collect();
        }
        params
    }
}

impl From<&str> for Request {
    fn from(text: &str) -> Request {
        Request::chat(text)
    }
}

impl From<String> for Request {
    fn from(text: String) -> Request {
        Request::chat(text)
    }
}

impl From<&String> for Request {
    fn from(text: &String) -> Request {
        Request::chat(text)
    }
}

impl From<Vec<Message>> for Request {
    fn from(messages: Vec<Message>) -> Request {
        Request::messages(messages)
    }
}

fn option(name: &'static str, expected: &str, found: &str) -> Error {
    Error::Option { name, expected: expected.into(), found: found.into() }
}
