//! Routes of llama.cpp's server that OpenAI's API does not have: `/completion`, `/infill`, `/props` and `/slots`.

mod reply;
mod request;
pub(crate) mod routes;
mod schemas;
