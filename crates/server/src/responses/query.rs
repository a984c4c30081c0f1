//! Parameters in the query of a URL. Each is taken by name; others are refused by name.

use crate::http::error::ApiError;
use crate::http::fields::shown;

const MAX_PARAMETERS: usize = 32;
/// Range and default of `limit`, as in OpenAI's API.
const LIMITS: std::ops::RangeInclusive<usize> = 1..=100;
const DEFAULT_LIMIT: usize = 20;

/// Parameters that were not taken yet.
#[derive(Debug)]
pub(super) struct Query(Vec<(String, String)>);

impl Query {
    pub(super) fn read(query: Option<&str>) -> Result<Query, ApiError> {
        let pairs = query.unwrap_or_default().split('&').filter(|pair| !pair.is_empty());
        let mut parameters = Vec::new();
        for pair in pairs {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let (Some(name), Some(value)) = (decode(name), decode(value)) else {
                let message = "the query is not valid: percent-encoded bytes must be UTF-8";
                return Err(ApiError::invalid(message).code("invalid_query"));
            };
            // A list may be named with or without brackets.
            let name = name.strip_suffix("[]").map_or(name.clone(), str::to_owned);
            if parameters.len() == MAX_PARAMETERS {
                let message = format!("the query has more than {MAX_PARAMETERS} parameters");
                return Err(ApiError::invalid(message).code("invalid_query"));
            }
            parameters.push((name, value));
        }
        Ok(Query(parameters))
    }

    /// Takes a parameter, which must not be repeated.
    pub(super) fn take(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        let Some(at) = self.0.iter().position(|(key, _)| key == name) else { return Ok(None) };
        let (_, value) = self.0.swap_remove(at);
        if self.0.iter().any(|(key, _)| key == name) {
            return Err(ApiError::field(name, format!("{name} must not be repeated")));
        }
        Ok(Some(value))
    }

    /// Takes a parameter that is `true` or `false`, the default.
    pub(super) fn boolean(&mut self, name: &str) -> Result<bool, ApiError> {
        match self.take(name)?.as_deref() {
            None | Some("false") => Ok(false),
            Some("true") => Ok(true),
            Some(other) => {
                let message = format!("{name}: expected true or false, found {}", shown(other));
                Err(ApiError::field(name, message))
            }
        }
    }

    /// Takes a parameter that is a whole number.
    pub(super) fn number(&mut self, name: &str) -> Result<Option<usize>, ApiError> {
        let Some(text) = self.take(name)? else { return Ok(None) };
        match text.parse::<u32>() {
            Ok(number) => Ok(Some(number as usize)),
            Err(_) => {
                let message = format!("{name}: expected a whole number, found {}", shown(&text));
                Err(ApiError::field(name, message).code("out_of_range"))
            }
        }
    }

    /// Refuses a parameter unless its value asks for the default behaviour.
    pub(super) fn refuse(&mut self, name: &str, harmless: &[&str], why: &str) -> Result<(), ApiError> {
        let is_refused = |(key, value): &(String, String)| key == name && !harmless.contains(&value.as_str());
        if self.0.iter().any(is_refused) {
            return Err(ApiError::field(name, format!("{name} is not supported: {why}")).code("unsupported_parameter"));
        }
        self.0.retain(|(key, _)| key != name);
        Ok(())
    }

    /// Refuses parameters that were not taken.
    pub(super) fn finish(self) -> Result<(), ApiError> {
        match self.0.first() {
            None => Ok(()),
            Some((name, _)) => {
                let message = format!("unknown parameter {} in the query", shown(name));
                let name: String = name.chars().take(64).collect();
                Err(ApiError::field(name, message).code("unknown_parameter"))
            }
        }
    }
}

/// The page of a list that a client asks for.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Page {
    limit: usize,
    is_ascending: bool,
    after: Option<String>,
}

impl Page {
    pub(super) fn read(query: &mut Query) -> Result<Page, ApiError> {
        let limit = match query.take("limit")? {
            None => DEFAULT_LIMIT,
            Some(text) => match text.parse() {
                Ok(limit) if LIMITS.contains(&limit) => limit,
                _ => {
                    let (low, high) = (LIMITS.start(), LIMITS.end());
                    let message = format!("limit: expected {low} to {high}, found {}", shown(&text));
                    return Err(ApiError::field("limit", message).code("out_of_range"));
                }
            },
        };
        let is_ascending = match query.take("order")?.as_deref() {
            None | Some("desc") => false,
            Some("asc") => true,
            Some(other) => {
                let message = format!("order: expected asc or desc, found {}", shown(other));
                return Err(ApiError::field("order", message));
            }
        };
        Ok(Page { limit, is_ascending, after: query.take("after")? })
    }

    /// Returns the positions of the page's entries in a list with the given ids, and whether more follow.
    pub(super) fn of(&self, ids: &[&str]) -> Result<(Vec<usize>, bool), ApiError> {
        let mut all: Vec<usize> = (0..ids.len()).collect();
        if !self.is_ascending {
            all.reverse();
        }
        let start = match &self.after {
            None => 0,
            Some(after) => match all.iter().position(|&at| ids[at] == after) {
                Some(at) => at + 1,
                None => {
                    let message = format!("after: no item {} is in the list", shown(after));
                    return Err(ApiError::field("after", message));
                }
            },
        };
        let rest = &all[start..];
        Ok((rest.iter().copied().take(self.limit).collect(), rest.len() > self.limit))
    }
}

/// Decodes percent-encoded text; `None` if it is not UTF-8.
fn decode(text: &str) -> Option<String> {
    let mut bytes = Vec::new();
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'+' => b' ',
            b'%' => {
                let digit = |byte: Option<u8>| char::from(byte?).to_digit(16);
                let (high, low) = (digit(rest.next())?, digit(rest.next())?);
                (high * 16 + low) as u8
            }
            byte => byte,
        });
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(query: &str) -> Result<Page, ApiError> {
        let mut query = Query::read(Some(query))?;
        let page = Page::read(&mut query)?;
        query.finish()?;
        Ok(page)
    }

    #[test]
    fn pages_follow_each_other() {
        let ids = ["a", "b", "c", "d", "e"];
        for (query, expected, more) in [
            ("", vec![4, 3, 2, 1, 0], false),
            ("order=asc", vec![0, 1, 2, 3, 4], false),
            ("order=asc&limit=2", vec![0, 1], true),
            ("order=asc&limit=2&after=b", vec![2, 3], true),
            ("order=asc&limit=2&after=%64", vec![4], false),
            ("limit=2&after=b", vec![0], false),
            ("order=asc&after=e", vec![], false),
        ] {
            assert_eq!(page(query).unwrap().of(&ids), Ok((expected, more)), "{query}");
        }
        assert_eq!(page("after=z").unwrap().of(&ids).unwrap_err().detail.param.as_deref(), Some("after"));
    }

    #[test]
    fn parameters_are_honoured_or_refused_by_name() {
        for (query, param) in [
            ("limit=0", Some("limit")),
            ("limit=101", Some("limit")),
            ("limit=x", Some("limit")),
            ("limit=1&limit=2", Some("limit")),
            ("order=up", Some("order")),
            ("page=2", Some("page")),
            ("after=%ff", None),
            ("after=%", None),
        ] {
            assert_eq!(page(query).unwrap_err().detail.param.as_deref(), param, "{query}");
        }
        let mut query = Query::read(Some("include%5B%5D=a&stream=false")).unwrap();
        assert!(query.refuse("include", &[], "why").is_err());
        assert!(query.refuse("stream", &["false"], "why").is_ok());
    }
}
