//! The variables that a template reads without setting them, as a caller may set them.

use std::collections::HashSet;

use super::syntax::{Arguments, Expression, Macro, Program, Statement, StatementKind, Symbol, Target};

/// Returns the names that the template reads, on some path, before it sets them.
pub(super) fn undeclared(program: &Program) -> HashSet<String> {
    let mut search = Search { set: vec![HashSet::new()], found: HashSet::new() };
    search.statements(&program.body);
    search.found.into_iter().map(|symbol| program.names[symbol as usize].clone()).collect()
}

struct Search {
    /// Names that were set, by scope.
    set: Vec<HashSet<Symbol>>,
    found: HashSet<Symbol>,
}

impl Search {
    fn scoped(&mut self, search: impl FnOnce(&mut Search)) {
        self.set.push(HashSet::new());
        search(self);
        self.set.pop();
    }

    fn declare(&mut self, symbol: Symbol) {
        if let Some(scope) = self.set.last_mut() {
            scope.insert(symbol);
        }
    }

    fn read(&mut self, symbol: Symbol) {
        if !self.set.iter().any(|scope| scope.contains(&symbol)) {
            self.found.insert(symbol);
        }
    }

    fn target(&mut self, target: &Target) {
        match target {
            Target::Name(symbol) => self.declare(*symbol),
            Target::Attribute(symbol, _) => self.read(*symbol),
            Target::Tuple(targets) => targets.iter().for_each(|target| self.target(target)),
        }
    }

    fn statements(&mut self, body: &[Statement]) {
        body.iter().for_each(|statement| self.statement(&statement.kind));
    }

    fn statement(&mut self, statement: &StatementKind) {
        match statement {
            StatementKind::Data(_) | StatementKind::Break | StatementKind::Continue => {}
            StatementKind::Print(expression) => self.expression(expression),
            StatementKind::If(branches, otherwise) => {
                // A name is set after the branches if each of them sets it.
                let mut set_by_all: Option<HashSet<Symbol>> = None;
                let mut branch = |this: &mut Search, body: &[Statement]| {
                    let before = this.set.last().cloned().unwrap_or_default();
                    this.statements(body);
                    let after = this.set.last_mut().map(|scope| std::mem::replace(scope, before)).unwrap_or_default();
                    set_by_all = Some(match set_by_all.take() {
                        Some(others) => others.intersection(&after).copied().collect(),
                        None => after,
                    });
                };
                for (condition, body) in branches {
                    self.expression(condition);
                    branch(self, body);
                }
                branch(self, otherwise);
                if let (Some(scope), Some(set)) = (self.set.last_mut(), set_by_all) {
                    *scope = set;
                }
            }
            StatementKind::For(node) => {
                self.expression(&node.items);
                self.scoped(|this| {
                    this.target(&node.target);
                    node.condition.iter().for_each(|condition| this.expression(condition));
                    this.statements(&node.body);
                });
                self.scoped(|this| this.statements(&node.otherwise));
            }
            StatementKind::Set(target, value) => {
                self.expression(value);
                self.target(target);
            }
            StatementKind::SetBlock(target, filters, body) => {
                filters.iter().for_each(|filter| self.arguments(&filter.arguments));
                self.scoped(|this| this.statements(body));
                self.target(target);
            }
            StatementKind::With(assignments, body) => {
                assignments.iter().for_each(|(_, value)| self.expression(value));
                self.scoped(|this| {
                    assignments.iter().for_each(|(target, _)| this.target(target));
                    this.statements(body);
                });
            }
            StatementKind::FilterBlock(filters, body) => {
                filters.iter().for_each(|filter| self.arguments(&filter.arguments));
                self.scoped(|this| this.statements(body));
            }
            StatementKind::Macro(node) => {
                self.declare(node.name);
                self.macro_body(node);
            }
            StatementKind::Call(call, node) => {
                self.expression(call);
                self.macro_body(node);
            }
            StatementKind::Scope(body) => self.scoped(|this| this.statements(body)),
        }
    }

    fn macro_body(&mut self, node: &Macro) {
        self.scoped(|this| {
            for (symbol, default) in &node.parameters {
                default.iter().for_each(|default| this.expression(default));
                this.declare(*symbol);
            }
            this.statements(&node.body);
        });
    }

    fn arguments(&mut self, arguments: &Arguments) {
        arguments.positional.iter().for_each(|value| self.expression(value));
        arguments.named.iter().for_each(|(_, value)| self.expression(value));
        arguments.more.iter().chain(&arguments.more_named).for_each(|value| self.expression(value));
    }

    fn expression(&mut self, expression: &Expression) {
        match expression {
            Expression::Text(_) | Expression::Int(_) | Expression::Float(_) | Expression::Bool(_) => {}
            Expression::None => {}
            Expression::Name(symbol) => self.read(*symbol),
            Expression::Attribute(value, _)
            | Expression::Not(value)
            | Expression::Negative(value)
            | Expression::Positive(value) => self.expression(value),
            Expression::Item(pair) => {
                self.expression(&pair.0);
                self.expression(&pair.1);
            }
            Expression::Slice(slice) => {
                self.expression(&slice.0);
                slice.1.iter().flatten().for_each(|bound| self.expression(bound));
            }
            Expression::Call(call) => {
                self.expression(&call.0);
                self.arguments(&call.1);
            }
            Expression::Filter(function) | Expression::Test(function) => {
                self.expression(&function.0);
                self.arguments(&function.1.arguments);
            }
            Expression::And(items)
            | Expression::Or(items)
            | Expression::Concat(items)
            | Expression::List(items)
            | Expression::Tuple(items) => items.iter().for_each(|item| self.expression(item)),
            Expression::Compare(first, rest) => {
                self.expression(first);
                rest.iter().for_each(|(_, value)| self.expression(value));
            }
            Expression::Arithmetic(first, rest) => {
                self.expression(first);
                rest.iter().for_each(|(_, value)| self.expression(value));
            }
            Expression::Conditional(parts) => {
                self.expression(&parts.0);
                self.expression(&parts.1);
                parts.2.iter().for_each(|value| self.expression(value));
            }
            Expression::Dict(pairs) => pairs.iter().for_each(|(key, value)| {
                self.expression(key);
                self.expression(value);
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::parser;
    use super::*;

    #[test]
    fn names_that_a_caller_may_set() {
        let cases = [
            ("{% set x = x | default(1) %}{{ x }}", "x"),
            ("{% set x = x if x is defined else 1 %}{{ x }}", "x"),
            ("{% if not x is defined %}{% set x = 1 %}{% endif %}{{ x }}", "x"),
            ("{% set x %}{{ x }}{% endset %}", "x"),
            ("{% set x = 1 %}{{ x }}", ""),
            // Only one path sets the name.
            ("{% if y %}{% set x = 1 %}{% endif %}{{ x }}", "x y"),
            ("{% if y %}{% set x = 1 %}{% elif y == 2 %}{% else %}{% set x = 2 %}{% endif %}{{ x }}", "x y"),
            ("{% if y %}{% set x = 1 %}{% else %}{% set x = 2 %}{% endif %}{{ x }}", "y"),
            ("{% set x = 1 %}{% if y %}{% set x = 2 %}{% endif %}{{ x }}", "y"),
            // A loop has its own variables.
            ("{% for y in z %}{% set x = y %}{% endfor %}{{ x }}", "x z"),
            ("{% macro f(x, y=z) %}{{ x }}{{ y }}{% endmacro %}{{ f(1) }}", "z"),
        ];
        for (source, expected) in cases {
            let mut found: Vec<String> = undeclared(&parser::parse(source).unwrap()).into_iter().collect();
            found.sort();
            assert_eq!(found.join(" "), expected, "{source}");
        }
    }
}
