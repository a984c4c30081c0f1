//! Runs statements: scopes, loops, macros and output.
//!
//! Variables live in two places. Those of the template's top level are globals, by symbol. Those of loops, blocks and
//! macros are on one stack; a macro sees the stack from its own frame on, which begins with what it captured.

use std::cell::Cell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use super::budget::{Budget, Held, collect, push};
use super::builtins::{CallArguments, iterate, named_pairs};
use super::failure::{Failure, Outcome};
use super::print;
use super::syntax::{Expression, For, Function, Macro, Program, Statement, StatementKind, Symbol, Target};
use super::text::{Text, TextBuilder};
use super::value::{Closure, Dict, List, Loop, Sequence, Value};
use crate::chat::DateTime;

/// How a statement ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flow {
    Next,
    Break,
    Continue,
}

/// Attributes of a `namespace`.
pub(super) struct Namespace {
    pub(super) attributes: HashMap<String, Value>,
    held: Held,
}

pub(super) struct Evaluator<'p, 'b, 'c> {
    pub(super) program: &'p Program,
    pub(super) budget: &'b Budget<'c>,
    pub(super) now: Option<DateTime>,
    pub(super) namespaces: Vec<Namespace>,
    /// The values of the last `loop.changed` of each loop that called it. They live as long as the rendering, so a loop
    /// among its own values leaks nothing.
    last_changed: Vec<List>,
    literals: Vec<Option<Text>>,
    globals: Vec<Option<Value>>,
    locals: Vec<(Symbol, Value)>,
    /// Bytes of `locals`.
    held: Held,
    /// Start of the current macro's variables in `locals`.
    frame: usize,
    /// Start of the innermost scope's variables in `locals`; `None` at the top level.
    scope: Option<usize>,
    output: TextBuilder<'b, 'c>,
    special: SpecialNames,
}

/// Names that the evaluator sets itself, if the template reads them.
struct SpecialNames {
    loop_: Option<Symbol>,
    varargs: Option<Symbol>,
    kwargs: Option<Symbol>,
    caller: Option<Symbol>,
}

impl<'p, 'b, 'c> Evaluator<'p, 'b, 'c> {
    pub(super) fn new(program: &'p Program, budget: &'b Budget<'c>, now: Option<DateTime>) -> Outcome<Self> {
        let symbol = |name: &str| program.names.iter().position(|known| known == name).map(|at| at as Symbol);
        Ok(Evaluator {
            special: SpecialNames {
                loop_: symbol("loop"),
                varargs: symbol("varargs"),
                kwargs: symbol("kwargs"),
                caller: symbol("caller"),
            },
            program,
            budget,
            now,
            namespaces: Vec::new(),
            last_changed: Vec::new(),
            literals: vec![None; program.strings.len()],
            globals: vec![None; program.names.len()],
            locals: Vec::new(),
            held: budget.hold(0)?,
            frame: 0,
            scope: None,
            output: TextBuilder::new(budget)?,
        })
    }

    /// Sets a variable before the template runs.
    pub(super) fn set_global(&mut self, symbol: Symbol, value: Value) {
        self.globals[symbol as usize] = Some(value);
    }

    /// Runs the whole template and returns its output.
    pub(super) fn run(mut self) -> Outcome<TextBuilder<'b, 'c>> {
        let program = self.program;
        self.statements(&program.body)?;
        Ok(self.output)
    }

    /// Returns a string of the template, as trusted text.
    pub(super) fn literal(&mut self, id: u32) -> Outcome<Text> {
        let slot = id as usize;
        if let Some(text) = &self.literals[slot] {
            return Ok(text.clone());
        }
        let text = Text::new(&self.program.strings[slot], true, self.budget)?;
        self.literals[slot] = Some(text.clone());
        Ok(text)
    }

    pub(super) fn variable(&self, symbol: Symbol) -> Outcome<Value> {
        let visible = &self.locals[self.frame..];
        self.budget.charge(visible.len() / 16 + 1)?;
        let found = visible.iter().rev().find(|(name, _)| *name == symbol).map(|(_, value)| value);
        Ok(match found.or(self.globals[symbol as usize].as_ref()) {
            Some(value) => value.clone(),
            None => Value::undefined(format!("'{}' is undefined", self.program.names[symbol as usize])),
        })
    }

    fn set_variable(&mut self, symbol: Symbol, value: Value) -> Outcome<()> {
        let Some(start) = self.scope else {
            self.set_global(symbol, value);
            return Ok(());
        };
        self.budget.charge((self.locals.len() - start) / 16)?;
        match self.locals[start..].iter_mut().find(|(name, _)| *name == symbol) {
            Some((_, known)) => *known = value,
            None => {
                self.held.grow_to((self.locals.len() + 1) * size_of::<(Symbol, Value)>() * 2)?;
                self.locals.push((symbol, value));
            }
        }
        Ok(())
    }

    /// Runs something with its own variables.
    fn scoped<T>(&mut self, run: impl FnOnce(&mut Self) -> Outcome<T>) -> Outcome<T> {
        let (start, outer) = (self.locals.len(), self.scope);
        self.scope = Some(start);
        let result = run(self);
        self.locals.truncate(start);
        self.scope = outer;
        result
    }

    /// Runs something and returns the text that it prints.
    fn captured(&mut self, run: impl FnOnce(&mut Self) -> Outcome<()>) -> Outcome<Text> {
        let outer = std::mem::replace(&mut self.output, TextBuilder::new(self.budget)?);
        let result = run(self);
        let text = std::mem::replace(&mut self.output, outer).finish();
        result.map(|()| text)
    }

    fn statements(&mut self, body: &[Statement]) -> Outcome<Flow> {
        self.budget.enter()?;
        let mut flow = Flow::Next;
        for statement in body {
            flow = self.statement(statement).map_err(|failure| failure.at(statement.place))?;
            if flow != Flow::Next {
                break;
            }
        }
        self.budget.leave();
        Ok(flow)
    }

    fn statement(&mut self, statement: &Statement) -> Outcome<Flow> {
        self.budget.charge(1)?;
        match &statement.kind {
            StatementKind::Data(text) => {
                let text = &self.program.strings[*text as usize];
                self.output.push(text, true)?;
            }
            StatementKind::Print(expression) => {
                let value = self.value(expression)?;
                print::print(&value, &mut self.output)?;
            }
            StatementKind::If(branches, otherwise) => {
                for (condition, body) in branches {
                    if self.value(condition)?.is_true() {
                        return self.statements(body);
                    }
                }
                return self.statements(otherwise);
            }
            StatementKind::For(node) => {
                let items = self.value(&node.items)?;
                self.for_loop(node, &items, 0)?;
            }
            StatementKind::Set(target, expression) => {
                let value = self.value(expression)?;
                self.assign(target, value)?;
            }
            StatementKind::SetBlock(target, filters, body) => {
                let text = self.block(body)?;
                let value = self.apply_filters(filters, Value::Text(text))?;
                self.assign(target, value)?;
            }
            StatementKind::With(assignments, body) => {
                let values: Vec<Value> =
                    assignments.iter().map(|(_, expression)| self.value(expression)).collect::<Outcome<_>>()?;
                return self.scoped(|this| {
                    for ((target, _), value) in assignments.iter().zip(values) {
                        this.assign(target, value)?;
                    }
                    this.statements(body)
                });
            }
            StatementKind::FilterBlock(filters, body) => {
                let text = self.block(body)?;
                let value = self.apply_filters(filters, Value::Text(text))?;
                print::print(&value, &mut self.output)?;
            }
            StatementKind::Macro(node) => {
                let closure = self.closure(node)?;
                self.set_variable(node.name, closure)?;
            }
            StatementKind::Call(call, node) => {
                let caller = self.closure(node)?;
                if let Expression::Call(call) = call {
                    let value = self.call_expression(&call.0, &call.1, Some(caller))?;
                    print::print(&value, &mut self.output)?;
                }
            }
            StatementKind::Scope(body) => return self.scoped(|this| this.statements(body)),
            StatementKind::Break => return Ok(Flow::Break),
            StatementKind::Continue => return Ok(Flow::Continue),
        }
        Ok(Flow::Next)
    }

    /// Returns the text that a body prints.
    fn block(&mut self, body: &[Statement]) -> Outcome<Text> {
        self.captured(|this| this.scoped(|this| this.statements(body).map(drop)))
    }

    fn apply_filters(&mut self, filters: &[Function], mut value: Value) -> Outcome<Value> {
        for filter in filters {
            let arguments = self.arguments(&filter.arguments)?;
            value = self.filter(&filter.name, value, arguments)?;
        }
        Ok(value)
    }

    fn assign(&mut self, target: &Target, value: Value) -> Outcome<()> {
        match target {
            Target::Name(symbol) => self.set_variable(*symbol, value),
            Target::Attribute(symbol, attribute) => {
                let Value::Namespace(index) = self.variable(*symbol)? else {
                    return Err(Failure::error("cannot assign attribute on non-namespace object"));
                };
                self.set_attribute(index, &self.program.strings[*attribute as usize], value)
            }
            Target::Tuple(targets) => {
                let values = iterate(&value, self.budget)?;
                if values.len() != targets.len() {
                    let (found, expected) = (values.len(), targets.len());
                    return Err(Failure::error(format!("cannot unpack {found} values into {expected} names")));
                }
                let mut pairs = targets.iter().zip(values.values());
                pairs.try_for_each(|(target, value)| self.assign(target, value.clone()))
            }
        }
    }

    pub(super) fn new_namespace(&mut self) -> Outcome<usize> {
        let held = self.budget.hold(size_of::<Namespace>())?;
        self.namespaces.push(Namespace { attributes: HashMap::new(), held });
        Ok(self.namespaces.len() - 1)
    }

    pub(super) fn set_attribute(&mut self, namespace: usize, name: &str, value: Value) -> Outcome<()> {
        let namespace = &mut self.namespaces[namespace];
        if let Some(known) = namespace.attributes.get_mut(name) {
            *known = value;
            return Ok(());
        }
        let entry = 2 * (size_of::<(String, Value)>() + name.len());
        namespace.held.grow_to(size_of::<Namespace>() + (namespace.attributes.len() + 1) * entry)?;
        namespace.attributes.insert(name.to_owned(), value);
        Ok(())
    }

    fn for_loop(&mut self, node: &Arc<For>, items: &Value, depth0: usize) -> Outcome<()> {
        let mut items = iterate(items, self.budget)?;
        if let Some(condition) = &node.condition {
            let mut kept = Vec::new();
            for item in items.values() {
                let item = item.clone();
                let keep = self.scoped(|this| {
                    this.assign(&node.target, item.clone())?;
                    Ok(this.value(condition)?.is_true())
                })?;
                if keep {
                    push(&mut kept, item)?;
                }
            }
            items = List::new(kept, Sequence::List, self.budget)?;
        }
        if items.len() == 0 {
            return self.scoped(|this| this.statements(&node.otherwise).map(drop));
        }
        let recursive = node.is_recursive.then(|| Arc::clone(node));
        let state = Rc::new(Loop {
            items: items.clone(),
            index0: Cell::new(0),
            depth0,
            node: recursive,
            changed: Cell::new(None),
        });
        let name = self.special.loop_;
        for (index, item) in items.values().iter().enumerate() {
            state.index0.set(index);
            let flow = self.scoped(|this| {
                if let Some(name) = name {
                    this.set_variable(name, Value::Loop(Rc::clone(&state)))?;
                }
                this.assign(&node.target, item.clone())?;
                this.statements(&node.body)
            })?;
            if flow == Flow::Break {
                break;
            }
        }
        Ok(())
    }

    /// Returns whether the values differ from those of the loop's last call, if there was one.
    pub(super) fn has_changed(&mut self, state: &Loop, values: List) -> Outcome<bool> {
        let Some(slot) = state.changed.get() else {
            state.changed.set(Some(self.last_changed.len()));
            self.last_changed.push(values);
            return Ok(true);
        };
        let last = Value::List(self.last_changed[slot].clone());
        let is_same = last.equals(&Value::List(values.clone()), self.budget)?;
        self.last_changed[slot] = values;
        Ok(!is_same)
    }

    /// Runs a recursive loop for other items and returns its text.
    pub(super) fn call_loop(&mut self, state: &Loop, arguments: CallArguments) -> Outcome<Value> {
        let (Some(node), [items]) = (&state.node, &arguments.positional[..]) else {
            return Err(Failure::error("only a recursive loop can be called, with one argument"));
        };
        let (node, items) = (Arc::clone(node), items.clone());
        let text = self.captured(|this| this.for_loop(&node, &items, state.depth0 + 1))?;
        Ok(Value::Text(text))
    }

    /// Returns a macro with the variables that it can see, except those of the top level.
    fn closure(&mut self, node: &Arc<Macro>) -> Outcome<Value> {
        let captured = self.locals[self.frame..].to_vec();
        Ok(Value::Macro(Rc::new(Closure::new(Arc::clone(node), captured, self.budget)?)))
    }

    /// Calls a macro and returns the text that it prints.
    pub(super) fn call_macro(&mut self, closure: &Rc<Closure>, arguments: CallArguments) -> Outcome<Value> {
        let (frame, scope, start) = (self.frame, self.scope, self.locals.len());
        self.frame = start;
        self.scope = Some(start);
        let result = self.captured(|this| this.run_macro(closure, arguments));
        self.locals.truncate(start);
        (self.frame, self.scope) = (frame, scope);
        result.map(Value::Text)
    }

    fn run_macro(&mut self, closure: &Rc<Closure>, arguments: CallArguments) -> Outcome<()> {
        let node = &closure.node;
        let name = || &self.program.names[node.name as usize];
        let CallArguments { positional, mut named, has_foreign_names, caller } = arguments;
        if positional.len() > node.parameters.len() && !node.reads_varargs {
            let most = node.parameters.len();
            return Err(Failure::error(format!("macro '{}' takes not more than {most} argument(s)", name())));
        }
        if caller.is_some() && !node.reads_caller {
            let message = "was invoked with two values for the special caller argument or does not use it";
            return Err(Failure::error(format!("macro '{}' {message}", name())));
        }
        for (symbol, value) in &closure.captured {
            self.set_variable(*symbol, value.clone())?;
        }
        if !closure.captured.is_empty() {
            self.set_variable(node.name, Value::Macro(Rc::clone(closure)))?;
            self.scope = Some(self.locals.len());
        }
        let names = &self.program.names;
        let mut given = positional.into_iter();
        let mut values = Vec::new();
        for (symbol, _) in &node.parameters {
            let by_name = named.iter().position(|(name, _)| *name == names[*symbol as usize]);
            let value = match (given.next(), by_name) {
                (Some(_), Some(_)) => {
                    let (name, parameter) = (name(), &names[*symbol as usize]);
                    return Err(Failure::error(format!("macro '{name}' got two values for argument '{parameter}'")));
                }
                (Some(value), None) => Some(value),
                (None, Some(index)) => Some(named.remove(index).1),
                (None, None) => None,
            };
            values.push(value);
        }
        let varargs = collect(given)?;
        if !named.is_empty() && !node.reads_kwargs {
            let unknown = &named[0].0;
            return Err(Failure::error(format!("macro '{}' takes no keyword argument '{unknown}'", name())));
        }
        for ((symbol, default), value) in node.parameters.iter().zip(values) {
            let value = match (value, default) {
                (Some(value), _) => value,
                (None, Some(default)) => self.value(default)?,
                (None, None) => {
                    let name = &names[*symbol as usize];
                    Value::undefined(format!("parameter '{name}' was not provided"))
                }
            };
            self.set_variable(*symbol, value)?;
        }
        let rest = CallArguments { positional: varargs, named, has_foreign_names, caller };
        self.set_special(node, rest)?;
        self.statements(&node.body).map(drop)
    }

    /// Sets `varargs`, `kwargs` and `caller` in a macro that reads them.
    fn set_special(&mut self, node: &Macro, mut rest: CallArguments) -> Outcome<()> {
        let budget = self.budget;
        let caller = rest.caller.take();
        let varargs = std::mem::take(&mut rest.positional);
        if let (true, Some(symbol)) = (node.reads_varargs, self.special.varargs) {
            self.set_variable(symbol, Value::sequence(varargs, Sequence::Tuple, budget)?)?;
        }
        if let (true, Some(symbol)) = (node.reads_kwargs, self.special.kwargs) {
            let dict = Dict::new(named_pairs(rest, budget)?, budget)?;
            self.set_variable(symbol, Value::Dict(dict))?;
        }
        if let (true, Some(symbol)) = (node.reads_caller, self.special.caller) {
            let undefined = || Value::undefined("No caller defined".to_owned());
            self.set_variable(symbol, caller.unwrap_or_else(undefined))?;
        }
        Ok(())
    }
}
