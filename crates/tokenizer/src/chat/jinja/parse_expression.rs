//! Tokens to a syntax tree: expressions, with the precedence of Jinja.

use super::failure::Outcome;
use super::lexer::Token;
use super::parser::Parser;
use super::syntax::{Arguments, Arithmetic, Comparison, Expression, Function};

/// Returns the only element, or makes a node of several.
fn one_or(mut items: Vec<Expression>, node: fn(Vec<Expression>) -> Expression) -> Expression {
    match items.pop() {
        Some(only) if items.is_empty() => only,
        Some(last) => {
            items.push(last);
            node(items)
        }
        None => node(items),
    }
}

impl Parser {
    /// Parses an expression, or several with commas between them as a tuple.
    pub(super) fn tuple(&mut self, with_conditional: bool) -> Outcome<Expression> {
        let mut items = Vec::new();
        loop {
            let is_end = matches!(self.current(), None | Some(Token::VariableEnd | Token::BlockEnd))
                || self.is_operator(")")
                || self.is_name("recursive");
            if is_end && !items.is_empty() {
                return Ok(Expression::Tuple(items));
            }
            items.push(if with_conditional { self.expression()? } else { self.alternatives()? });
            if !self.skip_operator(",") {
                return Ok(one_or(items, Expression::Tuple));
            }
        }
    }

    pub(super) fn expression(&mut self) -> Outcome<Expression> {
        self.enter()?;
        let mut levels = 1;
        let mut value = self.alternatives()?;
        while self.skip_name("if") {
            self.enter()?;
            levels += 1;
            let condition = self.alternatives()?;
            let otherwise = if self.skip_name("else") { Some(self.expression()?) } else { None };
            value = Expression::Conditional(Box::new((condition, value, otherwise)));
        }
        self.leave(levels);
        Ok(value)
    }

    fn alternatives(&mut self) -> Outcome<Expression> {
        let mut items = vec![self.conjunction()?];
        while self.skip_name("or") {
            items.push(self.conjunction()?);
        }
        Ok(one_or(items, Expression::Or))
    }

    fn conjunction(&mut self) -> Outcome<Expression> {
        let mut items = vec![self.negation()?];
        while self.skip_name("and") {
            items.push(self.negation()?);
        }
        Ok(one_or(items, Expression::And))
    }

    fn negation(&mut self) -> Outcome<Expression> {
        if !self.skip_name("not") {
            return self.comparison();
        }
        self.enter()?;
        let value = self.negation()?;
        self.leave(1);
        Ok(Expression::Not(Box::new(value)))
    }

    fn comparison(&mut self) -> Outcome<Expression> {
        let first = self.sum()?;
        let mut rest = Vec::new();
        loop {
            let comparison = match self.current() {
                Some(Token::Operator("==")) => Comparison::Equal,
                Some(Token::Operator("!=")) => Comparison::NotEqual,
                Some(Token::Operator("<")) => Comparison::Less,
                Some(Token::Operator("<=")) => Comparison::LessEqual,
                Some(Token::Operator(">")) => Comparison::Greater,
                Some(Token::Operator(">=")) => Comparison::GreaterEqual,
                Some(Token::Name(name)) if name == "in" => Comparison::In,
                Some(Token::Name(name))
                    if name == "not" && matches!(self.look(), Some(Token::Name(next)) if next == "in") =>
                {
                    self.next();
                    Comparison::NotIn
                }
                _ => break,
            };
            self.next();
            rest.push((comparison, self.sum()?));
        }
        Ok(if rest.is_empty() { first } else { Expression::Compare(Box::new(first), rest) })
    }

    /// Parses operators of one precedence, from left to right.
    fn chain(
        &mut self,
        operators: &[(&str, Arithmetic)],
        operand: fn(&mut Parser) -> Outcome<Expression>,
    ) -> Outcome<Expression> {
        let first = operand(self)?;
        let mut rest = Vec::new();
        while let Some((_, operator)) = operators.iter().find(|(text, _)| self.is_operator(text)) {
            self.next();
            rest.push((*operator, operand(self)?));
        }
        Ok(if rest.is_empty() { first } else { Expression::Arithmetic(Box::new(first), rest) })
    }

    fn sum(&mut self) -> Outcome<Expression> {
        self.chain(&[("+", Arithmetic::Add), ("-", Arithmetic::Subtract)], Parser::concatenation)
    }

    fn concatenation(&mut self) -> Outcome<Expression> {
        let mut items = vec![self.product()?];
        while self.skip_operator("~") {
            items.push(self.product()?);
        }
        Ok(one_or(items, Expression::Concat))
    }

    fn product(&mut self) -> Outcome<Expression> {
        let operators = [
            ("*", Arithmetic::Multiply),
            ("/", Arithmetic::Divide),
            ("//", Arithmetic::FloorDivide),
            ("%", Arithmetic::Modulo),
        ];
        self.chain(&operators, |parser| parser.chain(&[("**", Arithmetic::Power)], |parser| parser.unary(true)))
    }

    fn unary(&mut self, with_filters: bool) -> Outcome<Expression> {
        let value = if self.is_operator("-") || self.is_operator("+") {
            let is_negative = self.is_operator("-");
            self.next();
            self.enter()?;
            let value = Box::new(self.unary(false)?);
            self.leave(1);
            if is_negative { Expression::Negative(value) } else { Expression::Positive(value) }
        } else {
            self.primary()?
        };
        self.postfix(value, with_filters)
    }

    fn primary(&mut self) -> Outcome<Expression> {
        match self.current().cloned() {
            Some(Token::Name(name)) => {
                self.next();
                Ok(match name.as_str() {
                    "true" | "True" => Expression::Bool(true),
                    "false" | "False" => Expression::Bool(false),
                    "none" | "None" => Expression::None,
                    name => Expression::Name(self.symbol(name)),
                })
            }
            Some(Token::Text(mut text)) => {
                self.next();
                while let Some(Token::Text(more)) = self.current() {
                    text.push_str(more);
                    self.next();
                }
                Ok(Expression::Text(self.string(&text)))
            }
            Some(Token::Int(number)) => {
                self.next();
                Ok(Expression::Int(number))
            }
            Some(Token::Float(number)) => {
                self.next();
                Ok(Expression::Float(number))
            }
            Some(Token::Operator("(")) => {
                self.next();
                let value = if self.is_operator(")") { Expression::Tuple(Vec::new()) } else { self.tuple(true)? };
                self.expect_operator(")")?;
                Ok(value)
            }
            Some(Token::Operator("[")) => {
                self.next();
                Ok(Expression::List(self.list("]", Parser::expression)?))
            }
            Some(Token::Operator("{")) => {
                self.next();
                let pair = |parser: &mut Parser| {
                    let key = parser.expression()?;
                    parser.expect_operator(":")?;
                    Ok((key, parser.expression()?))
                };
                Ok(Expression::Dict(self.list("}", pair)?))
            }
            _ => Err(self.unexpected("an expression")),
        }
    }

    /// Parses items with commas between them, up to a closing bracket.
    fn list<T>(&mut self, end: &str, item: impl Fn(&mut Parser) -> Outcome<T>) -> Outcome<Vec<T>> {
        let mut items = Vec::new();
        while !self.skip_operator(end) {
            if !items.is_empty() {
                self.expect_operator(",")?;
                if self.skip_operator(end) {
                    break;
                }
            }
            items.push(item(self)?);
        }
        Ok(items)
    }

    /// Parses attributes, items and calls after a value, and filters and tests if allowed.
    fn postfix(&mut self, mut value: Expression, with_filters: bool) -> Outcome<Expression> {
        let mut levels = 0;
        let mut filtered = false;
        loop {
            self.enter()?;
            levels += 1;
            if self.is_operator("(") {
                value = Expression::Call(Box::new((value, self.arguments()?)));
            } else if !filtered && self.skip_operator(".") {
                value = match self.next() {
                    Some(Token::Name(name)) => Expression::Attribute(Box::new(value), self.string(&name)),
                    Some(Token::Int(index)) => Expression::Item(Box::new((value, Expression::Int(index)))),
                    _ => return Err(self.unexpected("a name or a number after '.'")),
                };
            } else if !filtered && self.skip_operator("[") {
                value = self.subscript(value)?;
            } else if with_filters && self.skip_operator("|") {
                filtered = true;
                value = Expression::Filter(Box::new((value, self.function(false)?)));
            } else if with_filters && self.skip_name("is") {
                filtered = true;
                let negated = self.skip_name("not");
                value = Expression::Test(Box::new((value, self.function(true)?)));
                if negated {
                    value = Expression::Not(Box::new(value));
                }
            } else {
                break;
            }
        }
        self.leave(levels);
        Ok(value)
    }

    fn subscript(&mut self, value: Expression) -> Outcome<Expression> {
        let first = if self.is_operator(":") { None } else { Some(self.expression()?) };
        if !self.skip_operator(":") {
            let Some(first) = first else { return Err(self.unexpected("an expression")) };
            if !self.is_operator("]") {
                self.expect_operator(",")?;
                let mut items = self.list("]", Parser::expression)?;
                items.insert(0, first);
                return Ok(Expression::Item(Box::new((value, Expression::Tuple(items)))));
            }
            self.expect_operator("]")?;
            return Ok(Expression::Item(Box::new((value, first))));
        }
        let mut bounds = [first, None, None];
        for bound in &mut bounds[1..] {
            if !self.is_operator(":") && !self.is_operator("]") {
                *bound = Some(self.expression()?);
            }
            if !self.skip_operator(":") {
                break;
            }
        }
        self.expect_operator("]")?;
        Ok(Expression::Slice(Box::new((value, bounds))))
    }

    /// Parses the name and the arguments of a filter, or of a test, which may have one argument without parentheses.
    pub(super) fn function(&mut self, is_test: bool) -> Outcome<Function> {
        let mut name = self.expect_name()?;
        while self.skip_operator(".") {
            name = format!("{name}.{}", self.expect_name()?);
        }
        if self.is_operator("(") {
            return Ok(Function { name, arguments: self.arguments()? });
        }
        let mut arguments = Arguments::default();
        let has_argument = match self.current() {
            Some(Token::Name(name)) => !matches!(name.as_str(), "else" | "or" | "and" | "if" | "is"),
            Some(Token::Text(_) | Token::Int(_) | Token::Float(_)) => true,
            Some(Token::Operator(operator)) => matches!(*operator, "[" | "{"),
            _ => false,
        };
        if is_test && has_argument {
            let argument = self.primary()?;
            arguments.positional.push(self.postfix(argument, false)?);
        }
        Ok(Function { name, arguments })
    }

    fn arguments(&mut self) -> Outcome<Arguments> {
        self.expect_operator("(")?;
        let mut arguments = Arguments::default();
        let mut is_first = true;
        while !self.skip_operator(")") {
            if !std::mem::take(&mut is_first) {
                self.expect_operator(",")?;
                if self.skip_operator(")") {
                    break;
                }
            }
            if arguments.more.is_none() && self.skip_operator("*") {
                arguments.more = Some(self.expression()?);
            } else if arguments.more_named.is_none() && self.skip_operator("**") {
                arguments.more_named = Some(self.expression()?);
            } else if matches!(self.look(), Some(Token::Operator("=")))
                && let Some(Token::Name(name)) = self.current().cloned()
            {
                self.next();
                self.next();
                let symbol = self.symbol(&name);
                arguments.named.push((symbol, self.expression()?));
            } else if arguments.named.is_empty() && arguments.more.is_none() && arguments.more_named.is_none() {
                arguments.positional.push(self.expression()?);
            } else {
                return Err(self.unexpected("an argument with a name"));
            }
        }
        Ok(arguments)
    }
}
