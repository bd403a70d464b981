# What benchmarks/table_peers.py asks of R.
#
#   Rscript table_peers.R sets FOLDER       writes the data sets of R's packages into FOLDER, one CSV file each
#   Rscript table_peers.R fit CSV CODE      fits CODE to the table d, a line for each estimate: what, name, value,
#                                           standard error, ends of the interval; and processor seconds, warnings
suppressWarnings(suppressMessages(for (p in c("lme4", "glmmTMB", "ordinal", "survival")) require(p, character.only = TRUE)))
asked <- commandArgs(trailingOnly = TRUE)

sets <- list(
  cbpp = quote(lme4::cbpp), penicillin = quote(lme4::Penicillin), wine = quote(ordinal::wine),
  salamanders = quote(glmmTMB::Salamanders), owls = quote(glmmTMB::Owls), lung = quote(survival::lung)
)
if (asked[1] == "sets") {
  for (name in names(sets)) {
    d <- tryCatch(eval(sets[[name]]), error = function(e) NULL)
    if (!is.null(d)) write.csv(d, file.path(asked[2], paste0(name, ".csv")), row.names = FALSE)
  }
  quit()
}

d <- read.csv(asked[2], stringsAsFactors = TRUE)
tell <- function(what, name, value, se = NA, low = value - 1.959964 * se, high = value + 1.959964 * se)
  cat(sprintf("%s\t%s\t%.10g\t%.10g\t%.10g\t%.10g\n", what, name, value, se, low, high), sep = "")
fixed <- function(table) tell("fixed", rownames(table), table[, 1], table[, 2])
spreads <- function(of) for (g in names(of)) tell("sd", paste(g, colnames(of[[g]])), attr(of[[g]], "stddev"))

clock <- proc.time()
said <- character()
m <- withCallingHandlers(eval(parse(text = asked[3])), warning = function(w) {
  said <<- c(said, conditionMessage(w)); invokeRestart("muffleWarning")
})
s <- summary(m)
seconds <- sum((proc.time() - clock)[1:2])

ended <- length(said) == 0
if (inherits(m, "merMod")) {
  fixed(coef(s)); spreads(VarCorr(m))
  if (isLMM(m)) tell("family", "residual sd", sigma(m))
  ended <- ended && length(m@optinfo$conv$lme4) == 0
} else if (inherits(m, "glmmTMB")) {
  fixed(s$coefficients$cond)
  of <- VarCorr(m)$cond
  ends <- suppressWarnings(try(confint(m, parm = "theta_", method = "Wald"), silent = TRUE))
  k <- 0
  for (g in names(of)) for (e in colnames(of[[g]])) {
    k <- k + 1
    plain <- ncol(of[[g]]) == 1 && is.matrix(ends)
    tell("sd", paste(g, e), attr(of[[g]], "stddev")[[e]], NA, if (plain) ends[k, 1] else NA, if (plain) ends[k, 2] else NA)
  }
  if (length(fixef(m)$zi)) tell("family", "surplus zeros", plogis(fixef(m)$zi))
  name <- m$modelInfo$family$family
  value <- sigma(m)
  named <- c(nbinom2 = "size", beta = "precision", Gamma = "shape", gaussian = "residual sd")
  if (name %in% names(named)) tell("family", named[[name]], if (name == "Gamma") 1 / value^2 else value)
  ended <- m$fit$convergence == 0 && isTRUE(m$sdr$pdHess)
} else if (inherits(m, "clmm")) {
  table <- coef(s)
  cuts <- seq_along(m$alpha)
  fixed(table[-cuts, , drop = FALSE])
  spreads(VarCorr(m))
  tell("family", paste0("threshold[", cuts, "]"), table[cuts, 1], table[cuts, 2])
} else if (inherits(m, "survreg")) {  # the intercept of the mean of a Weibull time, log Gamma(1 + scale) above that of survreg
  V <- vcov(m)
  g <- rbind(diag(length(coef(m))), 0)
  g[nrow(g), 1] <- digamma(1 + m$scale) * m$scale
  tell("fixed", names(coef(m)), coef(m) + c(lgamma(1 + m$scale), rep(0, length(coef(m)) - 1)), sqrt(diag(t(g) %*% V %*% g)))
  tell("family", "shape", 1 / m$scale)
}
tell("seconds", "", seconds)
tell("converged", "", as.numeric(ended))
for (w in unique(said)) cat("said\t", gsub("[\n\t]", " ", substr(w, 1, 160)), "\n", sep = "")
