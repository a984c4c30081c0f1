//! The syntax tree of a template. Its depth is bounded by the parser.

use std::sync::Arc;

use super::failure::Place;

/// A name, as an index into [`Program::names`].
pub(super) type Symbol = u32;
/// A string of the template, as an index into [`Program::strings`].
pub(super) type StringId = u32;

/// A parsed template.
#[derive(Debug)]
pub(super) struct Program {
    pub(super) body: Vec<Statement>,
    pub(super) names: Vec<String>,
    /// String literals and text outside of tags.
    pub(super) strings: Vec<String>,
}

#[derive(Debug)]
pub(super) struct Statement {
    pub(super) place: Place,
    pub(super) kind: StatementKind,
}

#[derive(Debug)]
pub(super) enum StatementKind {
    Data(StringId),
    Print(Expression),
    /// Conditions with their bodies, and the body for none of them.
    If(Vec<(Expression, Vec<Statement>)>, Vec<Statement>),
    For(Arc<For>),
    Set(Target, Expression),
    SetBlock(Target, Vec<Function>, Vec<Statement>),
    With(Vec<(Target, Expression)>, Vec<Statement>),
    FilterBlock(Vec<Function>, Vec<Statement>),
    Macro(Arc<Macro>),
    /// A call with a body, which the called macro reaches as `caller`.
    Call(Expression, Arc<Macro>),
    /// A body with its own variables: `{% generation %}`.
    Scope(Vec<Statement>),
    Break,
    Continue,
}

#[derive(Debug)]
pub(super) struct For {
    pub(super) target: Target,
    pub(super) items: Expression,
    pub(super) condition: Option<Expression>,
    pub(super) body: Vec<Statement>,
    pub(super) otherwise: Vec<Statement>,
    pub(super) is_recursive: bool,
}

#[derive(Debug)]
pub(super) struct Macro {
    pub(super) name: Symbol,
    pub(super) parameters: Vec<(Symbol, Option<Expression>)>,
    pub(super) body: Vec<Statement>,
    pub(super) reads_varargs: bool,
    pub(super) reads_kwargs: bool,
    pub(super) reads_caller: bool,
}

/// The left side of an assignment.
#[derive(Debug)]
pub(super) enum Target {
    Name(Symbol),
    /// An attribute of a namespace.
    Attribute(Symbol, StringId),
    Tuple(Vec<Target>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Arithmetic {
    Add,
    Subtract,
    Multiply,
    Divide,
    FloorDivide,
    Modulo,
    Power,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Comparison {
    Equal,
    NotEqual,
    Less,
    LessEqual,
    Greater,
    GreaterEqual,
    In,
    NotIn,
}

/// Arguments of a call.
#[derive(Debug, Default)]
pub(super) struct Arguments {
    pub(super) positional: Vec<Expression>,
    pub(super) named: Vec<(Symbol, Expression)>,
    /// `*arguments`
    pub(super) more: Option<Expression>,
    /// `**arguments`
    pub(super) more_named: Option<Expression>,
}

/// A filter or a test with its arguments.
#[derive(Debug)]
pub(super) struct Function {
    pub(super) name: String,
    pub(super) arguments: Arguments,
}

#[derive(Debug)]
pub(super) enum Expression {
    Text(StringId),
    Int(i128),
    Float(f64),
    Bool(bool),
    None,
    Name(Symbol),
    Attribute(Box<Expression>, StringId),
    Item(Box<(Expression, Expression)>),
    /// A value with start, stop and step.
    Slice(Box<(Expression, [Option<Expression>; 3])>),
    Call(Box<(Expression, Arguments)>),
    Filter(Box<(Expression, Function)>),
    Test(Box<(Expression, Function)>),
    Not(Box<Expression>),
    Negative(Box<Expression>),
    Positive(Box<Expression>),
    And(Vec<Expression>),
    Or(Vec<Expression>),
    /// `a < b <= c`: each pair is compared.
    Compare(Box<Expression>, Vec<(Comparison, Expression)>),
    /// Operators of one precedence, from left to right.
    Arithmetic(Box<Expression>, Vec<(Arithmetic, Expression)>),
    Concat(Vec<Expression>),
    /// Condition, value if true, value if false.
    Conditional(Box<(Expression, Expression, Option<Expression>)>),
    List(Vec<Expression>),
    Tuple(Vec<Expression>),
    Dict(Vec<(Expression, Expression)>),
}
