//! Finds the model that a request names.

use std::sync::Arc;

use super::lease::{Lease, Served};
use super::registry::Models;
use super::{Purpose, ServedModel};
use crate::http::error::ApiError;
use crate::http::json::Json;
use crate::limits::tenants::Tenant;
use crate::openai::shared_fields::unknown_model;

/// The model of a request.
pub(crate) enum Chosen<M: Served> {
    Ready(Lease<M>),
    /// Index of a model that has to be loaded first.
    Absent(usize),
}

impl Tenant {
    /// Whether a model exists for this tenant.
    pub(crate) fn may_use(&self, model: &ServedModel) -> bool {
        let listed = |names: &Vec<String>| model.names().any(|name| names.iter().any(|listed| listed == name));
        self.config.models.as_ref().is_none_or(listed)
    }
}

impl Models {
    /// Returns the models that exist for a tenant, with their indexes.
    pub(crate) fn visible<'a>(&'a self, tenant: &'a Tenant) -> impl Iterator<Item = (usize, &'a ServedModel)> {
        self.entries().iter().enumerate().filter(|(_, entry)| tenant.may_use(entry))
    }

    /// Returns the index of the model with this name, if it exists for the tenant. Ollama's clients add the tag
    /// `latest` to names that have none.
    pub(crate) fn find(&self, name: &str, tenant: &Tenant) -> Option<usize> {
        let named = |name: &str| self.visible(tenant).find(|(_, entry)| entry.names().any(|own| own == name));
        named(name).or_else(|| named(name.strip_suffix(":latest")?)).map(|(index, _)| index)
    }

    /// Returns the index of the model with this name, or an error that lists the names that the tenant may use.
    pub(crate) fn find_or_refuse(&self, name: &str, tenant: &Tenant) -> Result<usize, ApiError> {
        let names = || self.visible(tenant).flat_map(|(_, entry)| entry.names());
        self.find(name, tenant).ok_or_else(|| unknown_model(name, names()))
    }

    /// Returns the first model of a purpose, which requests use that name none.
    pub(crate) fn first(&self, purpose: Purpose, tenant: &Tenant) -> Option<usize> {
        self.visible(tenant).find(|(_, entry)| entry.purpose == purpose).map(|(index, _)| index)
    }

    /// Chooses the model of a request by its field `model`, or `name` in the older form of Ollama.
    ///
    /// A request that names no model, or none properly, gets the first: reading it then reports what is wrong with it.
    pub(crate) fn choose<M: Served>(self: &Arc<Models>, body: &Json, tenant: &Tenant) -> Result<Chosen<M>, ApiError> {
        let name = member(body, "model").or_else(|| member(body, "name"));
        let found = name.and_then(|name| self.find(name, tenant));
        let names = || {
            let of_purpose = self.visible(tenant).filter(|(_, entry)| entry.purpose == M::PURPOSE);
            of_purpose.flat_map(|(_, entry)| entry.names())
        };
        let index = match (found, name, self.first(M::PURPOSE, tenant)) {
            (Some(index), Some(name), _) if self.entries()[index].purpose != M::PURPOSE => {
                return Err(wrong_purpose(name, M::PURPOSE, self.entries()[index].purpose));
            }
            (Some(index), ..) => index,
            (None, None, Some(first)) => first,
            // The only model refuses a wrong name itself, in the order in which it checks fields.
            (None, Some(_), Some(first)) if self.entries().len() == 1 => first,
            (None, name, _) => return Err(unknown_model(name.unwrap_or_default(), names())),
        };
        Ok(self.lease_ready(index).map_or(Chosen::Absent(index), Chosen::Ready))
    }
}

fn wrong_purpose(name: &str, wanted: Purpose, found: Purpose) -> ApiError {
    let message = format!("expected a model that {}, but {name:?} {}", wanted.does(), found.does());
    ApiError::field("model", message).code("model_not_supported")
}

/// Returns a string of an object.
fn member<'a>(body: &'a Json, name: &str) -> Option<&'a str> {
    let Json::Object(entries) = body else { return None };
    entries.iter().find_map(|(own, value)| match value {
        Json::String(text) if own == name => Some(text.as_str()),
        _ => None,
    })
}
