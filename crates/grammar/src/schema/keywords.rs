//! The keywords of JSON Schema: which are enforced, which only describe, and which are refused.

/// The value that a keyword takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shape {
    Schema,
    /// A schema, or a list of schemas in older drafts.
    SchemaOrList,
    SchemaList,
    SchemaMap,
    /// Any value.
    Anything,
    /// A list with at least one entry.
    List,
    Number,
    /// A count that the grammar spells out.
    Count,
    /// A count of characters.
    StringCount,
    Text,
    Texts,
    TypeName,
    /// A schema for the names of members, which every name satisfies. Generators of schemas write it for maps.
    AnyName,
}

impl Shape {
    pub(super) fn name(self) -> &'static str {
        match self {
            Shape::Schema => "an object or a boolean",
            Shape::SchemaOrList => "a schema or an array of schemas",
            Shape::SchemaList => "an array of schemas",
            Shape::SchemaMap => "an object of schemas",
            Shape::Anything => "a value",
            Shape::List => "an array with at least one entry",
            Shape::Number => "a number",
            Shape::Count | Shape::StringCount => "an integer",
            Shape::Text => "a string",
            Shape::Texts => "an array of strings",
            Shape::TypeName => "the name of a type, or an array of names",
            Shape::AnyName => "{\"type\": \"string\"}, because other rules for names are not enforced",
        }
    }
}

/// How a keyword is treated.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Keyword {
    Enforced(Shape),
    Annotation,
    Refused(String),
}

const ENFORCED: &[(&str, Shape)] = &[
    ("$defs", Shape::SchemaMap),
    ("$id", Shape::Text),
    ("$ref", Shape::Text),
    ("$schema", Shape::Text),
    ("additionalItems", Shape::Schema),
    ("additionalProperties", Shape::Schema),
    ("allOf", Shape::SchemaList),
    ("anyOf", Shape::SchemaList),
    ("const", Shape::Anything),
    ("definitions", Shape::SchemaMap),
    ("enum", Shape::List),
    ("exclusiveMaximum", Shape::Number),
    ("exclusiveMinimum", Shape::Number),
    ("format", Shape::Text),
    ("items", Shape::SchemaOrList),
    ("maxItems", Shape::Count),
    ("maxLength", Shape::StringCount),
    ("maxProperties", Shape::Count),
    ("maximum", Shape::Number),
    ("minItems", Shape::Count),
    ("minLength", Shape::StringCount),
    ("minProperties", Shape::Count),
    ("minimum", Shape::Number),
    ("multipleOf", Shape::Number),
    ("oneOf", Shape::SchemaList),
    ("pattern", Shape::Text),
    ("patternProperties", Shape::SchemaMap),
    ("prefixItems", Shape::SchemaList),
    ("properties", Shape::SchemaMap),
    ("propertyNames", Shape::AnyName),
    ("required", Shape::Texts),
    ("type", Shape::TypeName),
];

/// Keywords that describe, declare a name, or are hints of OpenAPI and of editors.
const ANNOTATIONS: &[&str] = &[
    "$anchor",
    "$comment",
    "$dynamicAnchor",
    "$recursiveAnchor",
    "$vocabulary",
    "contentEncoding",
    "contentMediaType",
    "contentSchema",
    "default",
    "deprecated",
    "deprecationMessage",
    "description",
    "discriminator",
    "enumDescriptions",
    "enumNames",
    "errorMessage",
    "example",
    "examples",
    "externalDocs",
    "markdownDescription",
    "markdownEnumDescriptions",
    "readOnly",
    "title",
    "writeOnly",
    "xml",
];

/// Annotations that the parser refuses.
pub(super) const UNKNOWN_TO_PARSER: [&str; 4] = ["$dynamicAnchor", "$recursiveAnchor", "$vocabulary", "contentSchema"];

impl Keyword {
    pub(super) fn of(name: &str) -> Keyword {
        if let Some((_, shape)) = ENFORCED.iter().find(|(enforced, _)| *enforced == name) {
            return Keyword::Enforced(*shape);
        }
        // `x-` marks extensions that validators ignore; `x-guidance` would set options of the parser.
        if ANNOTATIONS.contains(&name) || (name.starts_with("x-") && name != "x-guidance") {
            return Keyword::Annotation;
        }
        Keyword::Refused(format!("the keyword {name:?} is not enforced here; remove it and check the reply yourself"))
    }

    /// Returns the keywords whose value holds schemas.
    pub(super) fn holders() -> impl Iterator<Item = &'static str> {
        let holds = |shape| matches!(shape, Shape::Schema | Shape::SchemaOrList | Shape::SchemaList | Shape::SchemaMap);
        ENFORCED.iter().filter(move |(_, shape)| holds(*shape)).map(|(name, _)| *name)
    }
}
