//! Compiles the source of a grammar for the vocabulary of one model.
//!
//! Compilation runs on a thread of its own with a large stack, because the parsers of schemas and expressions are
//! recursive: a stack that overflows would end the process. Nothing is bounded by time. The limits below count nodes,
//! states and steps, so the same source has the same result on every machine.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::InferenceCapabilities;
use llguidance::{JsonCompileOptions, Matcher, ParserFactory};
use pellucid_sampling::{TokenConstraint, TokenMatcher};
use pellucid_tokenizer::Tokenizer;
use serde_json::{Value, json};

use crate::matcher::GrammarMatcher;
use crate::reply::Forbidden;
use crate::spelling::Characters;
use crate::vocabulary::Vocabulary;
use crate::{CallTool, Error, GrammarSource, NotEnforced, ReplyConstraint, ReplyRules, finite, gbnf, lark, schema};

/// Stack of the thread that compiles. Only the part that is used takes memory. The deepest source that the limits
/// allow, a chain of rules in a grammar of 256 KiB, uses a third of it in a debug build.
const STACK_BYTES: usize = 256 << 20;
/// Work to build the lexer, about 20 ms.
const INITIAL_LEXER_FUEL: u64 = 1_000_000;
/// Work of the lexer for one mask, about 7 ms.
const STEP_LEXER_FUEL: u64 = 100_000;
/// Parser items of one mask, about 2 ms.
const STEP_MAX_ITEMS: usize = 50_000;
/// Parser items at one position.
const MAX_ITEMS_IN_ROW: usize = 2_000;
/// States of one sequence's lexer, of about 1.5 kB each.
const MAX_LEXER_STATES: usize = 20_000;
/// Symbols of all productions.
const MAX_GRAMMAR_SIZE: usize = 200_000;
/// White space between the tokens of JSON: a space, or a line break with its indentation. Without a bound, a model can
/// fill a reply with white space.
const JSON_WHITESPACE: &str = r"\x20|\x0A[\x20\x09]{0,64}";
/// White space between the tokens of JSON in a call. Nobody reads a call, so it needs no line breaks, with which a weak
/// model fills its reply.
const CALL_WHITESPACE: &str = r"\x20";

/// Tokens of small letters, which a state that allows words takes as a whole. The other slices are of JSON strings.
const WORDS: &str = "[a-z]{1,10}";

/// Compiles grammars for the vocabulary of one model. Shared between threads.
pub struct GrammarCompiler {
    factory: ParserFactory,
    pub(crate) tokenizer: Arc<Tokenizer>,
    vocab_size: usize,
    /// The characters of a vocabulary that does not spell every text.
    characters: Option<Characters>,
}

impl std::fmt::Debug for GrammarCompiler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GrammarCompiler({} tokens)", self.vocab_size)
    }
}

impl GrammarCompiler {
    /// Builds the trie of the vocabulary. `vocab_size` is the number of logits of the model.
    pub fn new(tokenizer: Arc<Tokenizer>, vocab_size: usize) -> Result<GrammarCompiler, Error> {
        let vocabulary = Vocabulary::new(tokenizer.clone(), vocab_size)?;
        let characters = vocabulary.characters();
        let env = vocabulary.shared();
        let mut slices = SlicedBiasComputer::general_slices();
        slices.push(WORDS.to_owned());
        let mut factory = ParserFactory::new(&env, InferenceCapabilities::default(), &slices)
            .map_err(|error| Error::Vocabulary(error.to_string()))?;
        factory.quiet();
        let limits = factory.limits_mut();
        limits.initial_lexer_fuel = INITIAL_LEXER_FUEL;
        limits.step_lexer_fuel = STEP_LEXER_FUEL;
        limits.step_max_items = STEP_MAX_ITEMS;
        limits.max_items_in_row = MAX_ITEMS_IN_ROW;
        limits.max_lexer_states = MAX_LEXER_STATES;
        limits.max_grammar_size = MAX_GRAMMAR_SIZE;
        limits.verbose_errors = false;
        Ok(GrammarCompiler { factory, tokenizer, vocab_size, characters })
    }

    /// Compiles a source; an error names the place in it.
    pub fn compile(&self, source: &GrammarSource) -> Result<CompiledGrammar, Error> {
        source.check_size()?;
        std::thread::scope(|scope| {
            let work = || self.compile_here(source);
            let thread = std::thread::Builder::new().name("grammar".into()).stack_size(STACK_BYTES);
            let thread = thread.spawn_scoped(scope, work).map_err(|_| Error::NoThread)?;
            let internal = |_| Error::source(source.kind(), "an internal error occurred while it was compiled");
            thread.join().unwrap_or_else(|panic| Err(internal(panic)))
        })
    }

    /// Returns the constraint on a whole reply, made of compiled parts.
    pub fn reply(&self, rules: ReplyRules) -> ReplyConstraint {
        ReplyConstraint::new(rules, self.tokenizer.clone(), self.factory.tok_env().clone())
    }

    fn compile_here(&self, source: &GrammarSource) -> Result<CompiledGrammar, Error> {
        let grammar = match source {
            GrammarSource::JsonObject => json_grammar(&json!({ "type": "object" })),
            GrammarSource::JsonSchema(document) => {
                schema::check(document)?;
                let compile = |schema: &Value| self.matcher(json_grammar(schema));
                let matcher = compile(document)
                    .map_err(|problem| schema::locate(document, problem, |part| compile(part).err()))?;
                return Ok(self.compiled(matcher));
            }
            GrammarSource::Regex(text) => GrammarWithLexer::from_lark(lark::regex(text)?),
            GrammarSource::Grammar(text) if gbnf::is_gbnf(text) => GrammarWithLexer::from_lark(gbnf::to_lark(text)?),
            GrammarSource::Grammar(text) => {
                lark::check(text)?;
                let matcher = self.matcher(GrammarWithLexer::from_lark(text.clone()));
                let matcher = matcher.map_err(|problem| Error::source("grammar", lark::reworded(&problem)))?;
                return Ok(self.compiled(matcher));
            }
            GrammarSource::Choice(choices) => GrammarWithLexer::from_lark(lark::choice(choices)?),
            GrammarSource::Calls(calls) => return self.compile_calls(calls),
        };
        let matcher = self.matcher(grammar).map_err(|problem| Error::source(source.kind(), problem))?;
        Ok(self.compiled(matcher))
    }

    /// Returns a matcher at the beginning of a reply, or the problem in one line.
    pub(crate) fn matcher(&self, grammar: GrammarWithLexer) -> Result<Matcher, String> {
        self.matcher_of(grammar, true)
    }

    /// Returns a matcher. With `must_spell`, a grammar that the vocabulary cannot spell to an end is a problem.
    pub(crate) fn matcher_of(&self, grammar: GrammarWithLexer, must_spell: bool) -> Result<Matcher, String> {
        let parser = self.factory.create_parser(TopLevelGrammar::from_grammar(grammar));
        let parser = parser.map_err(|error| in_one_line(&format!("{error:#}")))?;
        finite::check(parser.parser.grammar(), self.factory.limits())?;
        if let Some(characters) = self.characters.as_ref().filter(|_| must_spell) {
            characters.check(parser.parser.grammar(), self.factory.limits())?;
        }
        let mut matcher = Matcher::new(Ok(parser));
        // The first mask finds a grammar that allows no text at all, and one that no token can begin.
        matcher.compute_mask_or_eos().map(|_| matcher).map_err(|error| in_one_line(&error.to_string()))
    }

    pub(crate) fn compiled(&self, matcher: Matcher) -> CompiledGrammar {
        CompiledGrammar {
            start: Mutex::new(matcher),
            env: self.factory.tok_env().clone(),
            forbidden: OnceLock::new(),
            tools: Vec::new(),
            not_enforced: Vec::new(),
        }
    }
}

/// Returns a message of the parser in one line, in terms of this crate.
fn in_one_line(text: &str) -> String {
    // The message of an invalid expression draws the position over several lines and ends with the reason.
    let reason = text.lines().rev().find_map(|line| line.strip_prefix("error: "));
    let first = text.lines().next().unwrap_or_default();
    if let Some(reason) = reason {
        format!("invalid regular expression: {reason}")
    } else if first.is_empty() || first.contains("NoExtension") {
        "no text that the model's vocabulary can spell satisfies it".into()
    } else if first.contains("coerce_one_of") {
        "the alternatives of oneOf may overlap, which is not enforced; use anyOf, or alternatives that differ in their \
         type or in a constant of a required property"
            .into()
    } else if first.contains("not present in a registry") {
        "$ref: expected a reference within the schema; schemas elsewhere are not fetched".into()
    } else {
        first.to_owned()
    }
}

/// Returns the grammar of a JSON schema.
pub(crate) fn json_grammar(document: &Value) -> GrammarWithLexer {
    GrammarWithLexer::from_json_schema(json_schema(document, JSON_WHITESPACE))
}

/// Returns the JSON schema of arguments of a call for the parser.
pub(crate) fn call_schema(document: &Value) -> Value {
    json_schema(document, CALL_WHITESPACE)
}

/// Returns a JSON schema for the parser, with an expression for the white space between tokens.
fn json_schema(document: &Value, whitespace: &str) -> Value {
    let mut schema = match document {
        // The options are a member of the schema, so a boolean has to be written as an object.
        Value::Bool(true) => json!({}),
        Value::Bool(false) => json!({ "enum": [] }),
        schema => schema.clone(),
    };
    schema::rewrite(&mut schema);
    let options = JsonCompileOptions { whitespace_pattern: Some(whitespace.into()), ..Default::default() };
    options.apply_to(&mut schema);
    schema
}

/// A compiled grammar, for any number of replies.
pub struct CompiledGrammar {
    /// A matcher before the first token. Each sequence gets a deep copy: a shared lexer would make one sequence's
    /// limits depend on the others.
    start: Mutex<Matcher>,
    pub(crate) env: llguidance::toktrie::TokEnv,
    /// Tokens that must not complete a trigger of calls, if this is a grammar of calls in which triggers are found.
    pub(crate) forbidden: OnceLock<Vec<Forbidden>>,
    pub(crate) tools: Vec<CallTool>,
    pub(crate) not_enforced: Vec<NotEnforced>,
}

impl std::fmt::Debug for CompiledGrammar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("CompiledGrammar")
    }
}

impl CompiledGrammar {
    /// Returns the tools of a grammar of calls, with the schemas that their arguments satisfy.
    pub fn tools(&self) -> &[CallTool] {
        &self.tools
    }

    /// Returns the parts of the tools' schemas that arguments need not satisfy, of tools that are not strict.
    pub fn not_enforced(&self) -> &[NotEnforced] {
        &self.not_enforced
    }

    pub(crate) fn grammar_matcher(&self) -> GrammarMatcher {
        let start = self.start.lock().unwrap_or_else(PoisonError::into_inner);
        GrammarMatcher::new(start.deep_clone(), self.env.clone())
    }
}

impl TokenConstraint for CompiledGrammar {
    fn matcher(&self) -> Box<dyn TokenMatcher> {
        Box::new(self.grammar_matcher())
    }
}
