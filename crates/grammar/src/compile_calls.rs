//! Compiles the grammar of calls, and leaves out parts of schemas that are not enforced where a tool is not `strict`.
//!
//! Keywords that are never enforced are known by name. Whether the others compile is known only after they were
//! compiled: alternatives of `oneOf` may overlap, and a pattern may look ahead. If the whole does not compile, the
//! schema of each tool is compiled alone, and the keyword that is the cause is found by trial. The number of trials is
//! bounded for all tools together.

use llguidance::api::GrammarWithLexer;
use serde_json::Value;

use crate::compiler::json_grammar;
use crate::{CallSource, CallTool, CompiledGrammar, Error, GrammarCompiler, NotEnforced, reply, schema};

/// Maximum number of schemas that are compiled to find out which keywords cannot be enforced.
const MAX_TRIALS: usize = 256;
/// Problem of a schema that is not compiled, because there were [`MAX_TRIALS`].
const NO_TRIAL_LEFT: &str = "too many keywords cannot be enforced";

impl GrammarCompiler {
    pub(crate) fn compile_calls(&self, source: &CallSource) -> Result<CompiledGrammar, Error> {
        let mut source = source.clone();
        let mut left_out = Vec::new();
        let syntax = source.format.arguments;
        source.tools.iter_mut().for_each(|tool| set_type(&mut tool.parameters));
        for tool in source.tools.iter_mut().filter(|tool| !tool.is_strict) {
            let mut places = Vec::new();
            schema::loosen(&mut tool.parameters, &mut places).map_err(|error| error.in_tool(&tool.name))?;
            reply::loosen(syntax, &mut tool.parameters, &mut places);
            left_out.extend(named(tool, places));
        }
        let (first, mut unwritten) = self.calls_matcher(&source)?;
        let matcher = match first {
            Ok(matcher) => matcher,
            Err(problem) => {
                let mut num_left = MAX_TRIALS;
                for tool in source.tools.iter_mut().filter(|tool| !tool.is_strict) {
                    let places = self.leave_out(&mut tool.parameters, source.is_required, &mut num_left);
                    left_out.extend(named(tool, places));
                }
                let (second, found) = self.calls_matcher(&source)?;
                unwritten = found;
                second.map_err(|_| self.locate_tool(&source, problem))?
            }
        };
        left_out.extend(unwritten);
        let mut compiled = self.compiled(matcher);
        (compiled.tools, compiled.not_enforced) = (source.tools, left_out);
        Ok(compiled)
    }

    /// Returns the matcher or the problem of the whole, and the places of values that may be anything.
    fn calls_matcher(
        &self,
        source: &CallSource,
    ) -> Result<(Result<llguidance::Matcher, String>, Vec<NotEnforced>), Error> {
        let mut unwritten = Vec::new();
        let text = reply::lark(source, &self.tokenizer, &mut unwritten)?;
        Ok((self.matcher_of(GrammarWithLexer::from_lark(text), source.is_required), unwritten))
    }

    /// Leaves out keywords until a schema compiles, and returns their places. A schema that no value satisfies stays as
    /// it is: its author made a mistake.
    fn leave_out(&self, parameters: &mut Value, must_spell: bool, num_left: &mut usize) -> Vec<String> {
        let mut places = Vec::new();
        let mut problem_of = |schema: &Value| match num_left.checked_sub(1) {
            None => Some(NO_TRIAL_LEFT.to_owned()),
            Some(rest) => {
                *num_left = rest;
                self.matcher_of(json_grammar(schema), must_spell).err()
            }
        };
        while let Some(problem) = problem_of(parameters).filter(|problem| !is_final(problem)) {
            let error = schema::locate(parameters, problem, &mut problem_of);
            let Error::Schema { place, problem } = error else { break };
            if is_final(&problem) {
                break;
            }
            let whole = parameters.clone();
            let compiles = |part: &Value| problem_of(&schema::with_definitions(part, &whole)).is_none();
            match schema::leave_out(parameters, &place, compiles) {
                Some(found) => places.extend(found),
                None => break,
            }
        }
        places
    }

    /// Finds the tool whose arguments do not compile.
    fn locate_tool(&self, calls: &CallSource, problem: String) -> Error {
        let compile = |schema: &Value| self.matcher_of(json_grammar(schema), calls.is_required).err();
        for tool in &calls.tools {
            if let Some(problem) = compile(&tool.parameters) {
                return schema::locate(&tool.parameters, problem, compile).in_tool(&tool.name);
            }
        }
        Error::source("tools", problem)
    }
}

/// Says that arguments are an object, which their schema may leave out.
fn set_type(parameters: &mut Value) {
    if let Value::Object(members) = parameters {
        members.entry("type").or_insert_with(|| "object".into());
    }
}

/// Whether a schema does not compile because no value satisfies it, or is not tried any more.
fn is_final(problem: &str) -> bool {
    ["nsatisfiable", "no finite text", "can spell", "cannot spell", NO_TRIAL_LEFT]
        .iter()
        .any(|text| problem.contains(text))
}

fn named(tool: &CallTool, places: Vec<String>) -> impl Iterator<Item = NotEnforced> {
    let name = tool.name.clone();
    places.into_iter().map(move |place| NotEnforced { tool: name.clone(), place })
}
