//! Tokens to a syntax tree: statements. Expressions are in `parse_expression.rs`.

use std::collections::HashMap;
use std::sync::Arc;

use super::failure::{Failure, Outcome, Place};
use super::lexer::{self, Token};
use super::syntax::{Expression, For, Function, Macro, Program, Statement, StatementKind, StringId, Symbol, Target};

/// Maximum nesting of statements and expressions in the source; the tree is at most twice as deep.
const MAX_NESTING: usize = 100;

pub(super) fn parse(source: &str) -> Outcome<Program> {
    let tokens = lexer::tokens(source)?;
    let mut parser = Parser { tokens, at: 0, nesting: 0, names: Interner::default(), strings: Interner::default() };
    let body = parser.statements(&[]).map_err(|failure| failure.at(parser.place()))?;
    Ok(Program { body, names: parser.names.list, strings: parser.strings.list })
}

#[derive(Default)]
struct Interner {
    list: Vec<String>,
    by_text: HashMap<String, u32>,
}

impl Interner {
    fn id(&mut self, text: &str) -> u32 {
        if let Some(&id) = self.by_text.get(text) {
            return id;
        }
        let id = self.list.len() as u32;
        self.list.push(text.to_owned());
        self.by_text.insert(text.to_owned(), id);
        id
    }
}

pub(super) struct Parser {
    tokens: Vec<(Token, Place)>,
    at: usize,
    nesting: usize,
    names: Interner,
    strings: Interner,
}

impl Parser {
    pub(super) fn place(&self) -> Place {
        let start = Place { line: 1, column: 1 };
        self.tokens.get(self.at).or(self.tokens.last()).map_or(start, |(_, place)| *place)
    }

    pub(super) fn symbol(&mut self, name: &str) -> Symbol {
        self.names.id(name)
    }

    pub(super) fn string(&mut self, text: &str) -> StringId {
        self.strings.id(text)
    }

    pub(super) fn current(&self) -> Option<&Token> {
        self.tokens.get(self.at).map(|(token, _)| token)
    }

    pub(super) fn look(&self) -> Option<&Token> {
        self.tokens.get(self.at + 1).map(|(token, _)| token)
    }

    pub(super) fn next(&mut self) -> Option<Token> {
        let token = self.current().cloned();
        self.at += 1;
        token
    }

    pub(super) fn is_name(&self, name: &str) -> bool {
        matches!(self.current(), Some(Token::Name(found)) if found == name)
    }

    pub(super) fn is_operator(&self, operator: &str) -> bool {
        matches!(self.current(), Some(Token::Operator(found)) if *found == operator)
    }

    pub(super) fn skip_name(&mut self, name: &str) -> bool {
        let found = self.is_name(name);
        self.at += usize::from(found);
        found
    }

    pub(super) fn skip_operator(&mut self, operator: &str) -> bool {
        let found = self.is_operator(operator);
        self.at += usize::from(found);
        found
    }

    pub(super) fn expect_operator(&mut self, operator: &str) -> Outcome<()> {
        if self.skip_operator(operator) { Ok(()) } else { Err(self.unexpected(&format!("'{operator}'"))) }
    }

    pub(super) fn expect_name(&mut self) -> Outcome<String> {
        match self.current() {
            Some(Token::Name(name)) => {
                let name = name.clone();
                self.at += 1;
                Ok(name)
            }
            _ => Err(self.unexpected("a name")),
        }
    }

    pub(super) fn unexpected(&self, expected: &str) -> Failure {
        let found = match self.current() {
            None => "the end of the template".to_owned(),
            Some(Token::Data(_)) => "text".to_owned(),
            Some(Token::VariableBegin) => "'{{'".to_owned(),
            Some(Token::VariableEnd) => "'}}'".to_owned(),
            Some(Token::BlockBegin) => "'{%'".to_owned(),
            Some(Token::BlockEnd) => "'%}'".to_owned(),
            Some(Token::Name(name)) => format!("'{name}'"),
            Some(Token::Text(_)) => "a string".to_owned(),
            Some(Token::Int(_) | Token::Float(_)) => "a number".to_owned(),
            Some(Token::Operator(operator)) => format!("'{operator}'"),
        };
        Failure::error(format!("unexpected {found}, expected {expected}")).at(self.place())
    }

    /// Enters one level of nesting; the caller subtracts it.
    pub(super) fn enter(&mut self) -> Outcome<()> {
        self.nesting += 1;
        if self.nesting > MAX_NESTING {
            let message = format!("statements and expressions nest deeper than {MAX_NESTING} levels");
            return Err(Failure::error(message).at(self.place()));
        }
        Ok(())
    }

    pub(super) fn leave(&mut self, levels: usize) {
        self.nesting -= levels;
    }

    /// Parses statements up to a tag that begins with one of `ends`; the name of that tag is the current token then.
    fn statements(&mut self, ends: &[&str]) -> Outcome<Vec<Statement>> {
        self.enter()?;
        let mut body = Vec::new();
        loop {
            let place = self.place();
            match self.next() {
                None if ends.is_empty() => break,
                None => return Err(self.unexpected(&format!("'{}'", ends.join("' or '")))),
                Some(Token::Data(text)) => {
                    let kind = StatementKind::Data(self.string(&text));
                    body.push(Statement { place, kind });
                }
                Some(Token::VariableBegin) => {
                    let place = self.place();
                    let kind = StatementKind::Print(self.tuple(true)?);
                    if self.next() != Some(Token::VariableEnd) {
                        self.at -= 1;
                        return Err(self.unexpected("'}}'"));
                    }
                    body.push(Statement { place, kind });
                }
                Some(Token::BlockBegin) => {
                    if ends.iter().any(|end| self.is_name(end)) {
                        break;
                    }
                    let place = self.place();
                    self.statement(place, &mut body).map_err(|failure| failure.at(place))?;
                    self.expect_block_end()?;
                }
                Some(_) => {
                    self.at -= 1;
                    return Err(self.unexpected("text or a tag"));
                }
            }
        }
        self.leave(1);
        Ok(body)
    }

    fn expect_block_end(&mut self) -> Outcome<()> {
        if self.current() == Some(&Token::BlockEnd) {
            self.at += 1;
            return Ok(());
        }
        Err(self.unexpected("'%}'"))
    }

    /// Parses the body of a block tag up to one of `ends`, whose name becomes the current token.
    fn body(&mut self, ends: &[&str]) -> Outcome<Vec<Statement>> {
        self.skip_operator(":");
        self.expect_block_end()?;
        self.statements(ends)
    }

    /// Parses the body of a block tag and the name of its end tag.
    fn whole_body(&mut self, end: &str) -> Outcome<Vec<Statement>> {
        let body = self.body(&[end])?;
        self.at += 1;
        Ok(body)
    }

    fn statement(&mut self, place: Place, out: &mut Vec<Statement>) -> Outcome<()> {
        let name = self.expect_name()?;
        let kind = match name.as_str() {
            "if" => self.condition()?,
            "for" => self.for_loop()?,
            "set" => self.set()?,
            "with" => {
                let mut assignments = Vec::new();
                while self.current() != Some(&Token::BlockEnd) {
                    if !assignments.is_empty() {
                        self.expect_operator(",")?;
                    }
                    let target = self.target(false)?;
                    self.expect_operator("=")?;
                    assignments.push((target, self.expression()?));
                }
                StatementKind::With(assignments, self.whole_body("endwith")?)
            }
            "filter" => {
                let filters = self.filters(true)?;
                StatementKind::FilterBlock(filters, self.whole_body("endfilter")?)
            }
            "macro" => {
                let name = self.expect_name()?;
                StatementKind::Macro(self.macro_rest(&name)?)
            }
            "call" => {
                let parameters = if self.is_operator("(") { self.parameters()? } else { Vec::new() };
                let call = self.expression()?;
                if !matches!(call, Expression::Call(_)) {
                    return Err(self.unexpected("a call before it"));
                }
                let start = self.at;
                let body = self.whole_body("endcall")?;
                StatementKind::Call(call, Arc::new(self.macro_of("caller", parameters, body, start)))
            }
            "generation" => StatementKind::Scope(self.whole_body("endgeneration")?),
            "print" => {
                while self.current() != Some(&Token::BlockEnd) {
                    let kind = StatementKind::Print(self.expression()?);
                    out.push(Statement { place, kind });
                    if self.current() != Some(&Token::BlockEnd) {
                        self.expect_operator(",")?;
                    }
                }
                return Ok(());
            }
            "break" => StatementKind::Break,
            "continue" => StatementKind::Continue,
            other => return Err(Failure::error(format!("unknown tag '{other}'"))),
        };
        out.push(Statement { place, kind });
        Ok(())
    }

    fn condition(&mut self) -> Outcome<StatementKind> {
        let mut branches = Vec::new();
        loop {
            let condition = self.tuple(false)?;
            let body = self.body(&["elif", "else", "endif"])?;
            branches.push((condition, body));
            match self.expect_name()?.as_str() {
                "elif" => {}
                "else" => return Ok(StatementKind::If(branches, self.whole_body("endif")?)),
                _ => return Ok(StatementKind::If(branches, Vec::new())),
            }
        }
    }

    fn for_loop(&mut self) -> Outcome<StatementKind> {
        let target = self.target(false)?;
        if !self.skip_name("in") {
            return Err(self.unexpected("'in'"));
        }
        let items = self.tuple(false)?;
        let condition = if self.skip_name("if") { Some(self.expression()?) } else { None };
        let is_recursive = self.skip_name("recursive");
        let body = self.body(&["endfor", "else"])?;
        let otherwise = if self.expect_name()? == "else" { self.whole_body("endfor")? } else { Vec::new() };
        Ok(StatementKind::For(Arc::new(For { target, items, condition, body, otherwise, is_recursive })))
    }

    fn set(&mut self) -> Outcome<StatementKind> {
        let target = self.target(true)?;
        if self.skip_operator("=") {
            return Ok(StatementKind::Set(target, self.tuple(true)?));
        }
        let filters = self.filters(false)?;
        Ok(StatementKind::SetBlock(target, filters, self.whole_body("endset")?))
    }

    /// Parses the left side of an assignment: a name, an attribute of a namespace if allowed, or a tuple of them.
    fn target(&mut self, with_attributes: bool) -> Outcome<Target> {
        let mut targets = Vec::new();
        let mut is_tuple = false;
        loop {
            targets.push(self.one_target(with_attributes)?);
            if !self.skip_operator(",") {
                break;
            }
            is_tuple = true;
            if self.is_name("in") || self.is_operator("=") || self.current() == Some(&Token::BlockEnd) {
                break;
            }
        }
        if is_tuple {
            return Ok(Target::Tuple(targets));
        }
        targets.pop().ok_or_else(|| self.unexpected("a name"))
    }

    fn one_target(&mut self, with_attributes: bool) -> Outcome<Target> {
        if self.skip_operator("(") {
            self.enter()?;
            let target = self.target(with_attributes)?;
            self.leave(1);
            self.expect_operator(")")?;
            return Ok(target);
        }
        let name = self.expect_name()?;
        if matches!(name.as_str(), "true" | "false" | "none" | "True" | "False" | "None") {
            return Err(Failure::error(format!("cannot assign to '{name}'")).at(self.place()));
        }
        let symbol = self.symbol(&name);
        if with_attributes && self.skip_operator(".") {
            let attribute = self.expect_name()?;
            return Ok(Target::Attribute(symbol, self.string(&attribute)));
        }
        Ok(Target::Name(symbol))
    }

    /// Parses filters, each after a pipe; the first without one if `begins_inline`.
    fn filters(&mut self, begins_inline: bool) -> Outcome<Vec<Function>> {
        let mut filters = Vec::new();
        while (begins_inline && filters.is_empty()) || self.skip_operator("|") {
            filters.push(self.function(false)?);
        }
        Ok(filters)
    }

    fn parameters(&mut self) -> Outcome<Vec<(Symbol, Option<Expression>)>> {
        self.expect_operator("(")?;
        let mut parameters: Vec<(Symbol, Option<Expression>)> = Vec::new();
        while !self.skip_operator(")") {
            if !parameters.is_empty() {
                self.expect_operator(",")?;
            }
            let name = self.expect_name()?;
            let symbol = self.symbol(&name);
            let default = if self.skip_operator("=") { Some(self.expression()?) } else { None };
            if default.is_none() && parameters.last().is_some_and(|(_, default)| default.is_some()) {
                return Err(Failure::error("non-default argument follows default argument").at(self.place()));
            }
            parameters.push((symbol, default));
        }
        Ok(parameters)
    }

    fn macro_rest(&mut self, name: &str) -> Outcome<Arc<Macro>> {
        let parameters = self.parameters()?;
        let start = self.at;
        let body = self.whole_body("endmacro")?;
        Ok(Arc::new(self.macro_of(name, parameters, body, start)))
    }

    /// Returns a macro whose body began at the token `start`.
    fn macro_of(
        &mut self,
        name: &str,
        parameters: Vec<(Symbol, Option<Expression>)>,
        body: Vec<Statement>,
        start: usize,
    ) -> Macro {
        let reads = |name: &str| {
            self.tokens[start..self.at].iter().any(|(token, _)| matches!(token, Token::Name(found) if found == name))
        };
        let (reads_varargs, reads_kwargs, reads_caller) = (reads("varargs"), reads("kwargs"), reads("caller"));
        Macro { name: self.symbol(name), parameters, body, reads_varargs, reads_kwargs, reads_caller }
    }
}
