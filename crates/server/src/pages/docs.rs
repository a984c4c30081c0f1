//! `GET /docs`: the OpenAPI document as a page.

use axum::body::{Body, Bytes};
use axum::http::Response;
use serde_json::{Map, Value};

use super::examples;
use super::home::navigation;
use super::html::{self, code_block, escape, prose};
use super::schema_text::{kind, limits, reference};

/// The page, which is the same for every request.
#[derive(Debug, Clone)]
pub(crate) struct DocsPage(Bytes);

impl DocsPage {
    /// Makes the page of an OpenAPI document. The examples call the server at `base_url`.
    pub(crate) fn new(document: &Value, base_url: &str, needs_key: bool) -> DocsPage {
        DocsPage(Writer { document, base_url, needs_key }.page().into())
    }

    pub(crate) fn respond(&self) -> Response<Body> {
        html::respond(self.0.clone())
    }
}

/// One method of one path.
struct Route<'a> {
    method: String,
    path: &'a str,
    operation: &'a Value,
}

impl Route<'_> {
    /// Returns the route as a fragment of an address.
    fn anchor(&self) -> String {
        let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '-' };
        format!("{}{}", self.method.to_ascii_lowercase(), self.path.chars().map(plain).collect::<String>())
    }
}

struct Writer<'a> {
    document: &'a Value,
    base_url: &'a str,
    needs_key: bool,
}

impl<'a> Writer<'a> {
    fn page(&self) -> String {
        let groups = self.groups();
        let schemas = self.shared_schemas(&groups);
        let mut contents = String::from("<nav class=\"contents\" aria-label=\"Contents\">\n");
        let mut sections = String::new();
        for (tag, routes) in &groups {
            contents += &format!("<h2>{}</h2>\n<ul>\n", escape(tag));
            sections += &format!("<h2>{}</h2>\n", escape(tag));
            for route in routes {
                contents += &format!(
                    "<li><a href=\"#{}\"><b>{}</b> {}</a></li>\n",
                    route.anchor(),
                    route.method,
                    escape(route.path)
                );
                sections += &self.route(route);
            }
            contents += "</ul>\n";
        }
        contents += "<div class=\"objects\">\n<h2>Objects</h2>\n<ul>\n";
        sections += "<h2>Objects</h2>\n";
        for name in &schemas {
            let shown = escape(name);
            contents += &format!("<li><a href=\"#schema-{shown}\">{shown}</a></li>\n");
            let fields = self.fields(&self.document["components"]["schemas"][name]);
            sections += &format!("<article id=\"schema-{shown}\">\n<h3>{shown}</h3>\n{fields}</article>\n");
        }
        contents += "</ul>\n</div>\n</nav>\n";
        let about = prose(self.document["info"]["description"].as_str().unwrap_or_default());
        let key = match self.needs_key {
            true => {
                "<p>Requests need a key: <code>Authorization: Bearer KEY</code> or <code>X-Api-Key: KEY</code>.</p>\n"
            }
            false => "",
        };
        let body = format!(
            "{}<main class=\"docs\">\n{contents}<div class=\"content\">\n<h1>API</h1>\n<p>{about} A field is honored or \
             refused by name; null means absent. Errors are OpenAI's error object. This page shows \
             <a href=\"/openapi.json\">/openapi.json</a>.</p>\n{key}{sections}</div>\n</main>\n",
            navigation("/docs"),
        );
        html::page("API · Pellucid", &body)
    }

    /// Returns the routes by tag, in the order of the document.
    fn groups(&self) -> Vec<(&'a str, Vec<Route<'a>>)> {
        let mut groups: Vec<(&str, Vec<Route<'_>>)> = Vec::new();
        let paths = self.document["paths"].as_object().into_iter().flatten();
        for (path, item) in paths {
            for (method, operation) in item.as_object().into_iter().flatten() {
                let tag = operation["tags"][0].as_str().unwrap_or("Other");
                let route = Route { method: method.to_ascii_uppercase(), path, operation };
                match groups.iter_mut().find(|(name, _)| *name == tag) {
                    Some((_, routes)) => routes.push(route),
                    None => groups.push((tag, vec![route])),
                }
            }
        }
        // OpenAI's routes are what most readers look for.
        groups.sort_by_key(|(tag, _)| (*tag != "OpenAI", *tag == "Operations"));
        groups
    }

    /// Returns the names of the schemas that the page refers to, and that are not shown with a route.
    fn shared_schemas(&self, groups: &[(&str, Vec<Route<'_>>)]) -> Vec<String> {
        let own: Vec<&str> =
            groups.iter().flat_map(|(_, routes)| routes).filter_map(|route| request_of(route)).collect();
        let all = self.document["components"]["schemas"].as_object();
        all.into_iter().flatten().map(|(name, _)| name.clone()).filter(|name| !own.contains(&name.as_str())).collect()
    }

    fn route(&self, route: &Route<'_>) -> String {
        let operation = route.operation;
        let summary = prose(operation["summary"].as_str().unwrap_or_default());
        let mut html = format!(
            "<article id=\"{}\">\n<h3><b class=\"{}\">{}</b> <code>{}</code></h3>\n<p>{summary}.",
            route.anchor(),
            route.method.to_ascii_lowercase(),
            route.method,
            escape(route.path),
        );
        if let Some(more) = operation["description"].as_str() {
            html += &format!(" {}", prose(more));
        }
        html += "</p>\n";
        let schema = request_of(route).map(|name| &self.document["components"]["schemas"][name]);
        let example = schema.map(|schema| &schema["examples"][0]).filter(|example| !example.is_null());
        if route.method == "GET" && route.path != "/v1/stream" || example.is_some() {
            let needs_key = self.needs_key && operation["security"].is_null();
            let call = examples::curl(self.base_url, &route.path.replace("{id}", "MODEL"), example, needs_key);
            html += &code_block("Example", &call);
        }
        let parameters = operation["parameters"].as_array().into_iter().flatten();
        let parameters: String = parameters.map(|one| field(one["name"].as_str(), one, &one["schema"], true)).collect();
        if !parameters.is_empty() {
            html += &format!("<h4>In the path</h4>\n<dl class=\"fields\">\n{parameters}</dl>\n");
        }
        if let Some(schema) = schema {
            html += &format!("<h4>Fields of the body</h4>\n{}", self.fields(schema));
        }
        html += &responses(&operation["responses"]);
        html + "</article>\n"
    }

    /// Returns the fields of an object, required ones first.
    fn fields(&self, schema: &Value) -> String {
        let about = schema["description"].as_str().map(|text| format!("<p>{}</p>\n", prose(text))).unwrap_or_default();
        let Some(properties) = schema["properties"].as_object() else {
            return format!("{about}<p class=\"kind\">{}</p>\n", kind(schema));
        };
        let required: Vec<&str> =
            schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        let mut rows: Vec<(&String, &Value)> = properties.iter().collect();
        rows.sort_by_key(|(name, _)| !required.contains(&name.as_str()));
        // A reply has all of its fields: the mark helps only in requests, whose further fields are refused.
        let is_request = !schema["additionalProperties"].is_null();
        let row = |(name, shape): (&String, &Value)| {
            field(Some(name), shape, shape, is_request && required.contains(&name.as_str()))
        };
        format!("{about}<dl class=\"fields\">\n{}</dl>\n", rows.into_iter().map(row).collect::<String>())
    }
}

/// Returns the name of the schema of a route's body.
fn request_of<'a>(route: &Route<'a>) -> Option<&'a str> {
    reference(&route.operation["requestBody"]["content"]["application/json"]["schema"])
}

fn field(name: Option<&str>, described: &Value, schema: &Value, is_required: bool) -> String {
    let mark = if is_required { " <em>required</em>" } else { "" };
    let kind = [vec![kind(schema)], limits(schema)].concat().join(", ");
    let about = described["description"].as_str().map(sentence).unwrap_or_default();
    format!(
        "<div><dt><code>{}</code>{mark} <span class=\"kind\">{kind}</span></dt><dd>{about}</dd></div>\n",
        escape(name.unwrap_or_default()),
    )
}

/// Returns a description as HTML, with a full stop at its end.
fn sentence(text: &str) -> String {
    let stop = if text.is_empty() || text.ends_with(['.', '?', ':']) { "" } else { "." };
    prose(text) + stop
}

fn responses(responses: &Value) -> String {
    let empty = Map::new();
    let mut rows = String::new();
    for (status, response) in responses.as_object().unwrap_or(&empty) {
        let about = response["description"].as_str().map(sentence).unwrap_or_default();
        let contents = response["content"].as_object().unwrap_or(&empty);
        let kinds: Vec<String> = contents
            .iter()
            .map(|(media, content)| match reference(&content["schema"]) {
                Some(_) => kind(&content["schema"]),
                None => escape(media),
            })
            .collect();
        rows += &format!(
            "<div><dt><code>{}</code> <span class=\"kind\">{}</span></dt><dd>{about}</dd></div>\n",
            escape(status),
            kinds.join(" or ")
        );
    }
    format!("<details><summary>Responses</summary>\n<dl class=\"fields\">\n{rows}</dl>\n</details>\n")
}
